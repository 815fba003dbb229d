"""A module of a verifier that ends whatever process imports it."""

import os

os._exit(5)

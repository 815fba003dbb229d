"""A module of a verifier that cannot be imported."""

raise RuntimeError("no licence file")

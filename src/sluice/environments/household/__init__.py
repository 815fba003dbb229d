"""Household: ALFWorld-format tasks in rooms with the real floor plans, played by a fast twin or by ALFWorld's own engine.

These are games of our own on the floor plans that the `alfworld` package ships; they are not the published valid_seen and valid_unseen
games, which are a download: say so wherever results are compared. Where things lie is drawn at random from ALFWorld's own tables of what
may lie where.

facts.py        floor plans, what may lie where and what can be done with it: facts.json, loaded on first use
facts.json      made from the `alfworld` package by make_facts.py; the twin needs no package at run time
make_facts.py   the script that makes it
game.py         one game: rooms, things, goal, and the names by which they are called
generator.py    draws a game: split, task type, floor plan, size and a seed give always the same one
twin.py         the twin: the texts, commands and effects of the engine in plain Python
goals.py        when a goal is reached, and how much of it
pddl.py         writes a game as ALFWorld reads it
engine.py       ALFWorld's own engine, with the commands of operators remembered
expert.py       plays well with what it has seen: for demonstrations and tests
environment.py  the environment `household`

A new task type is a line in generator.py (what it needs), goals.py (when it is reached) and expert.py (how it is played).
"""

"""Whole requests drawn at random, a scripted target that logs what it writes, and checks of every promise at once."""

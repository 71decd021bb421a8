"""Generators of conversations: who asks what, in which wording, and the one right answer."""

"""Screens of the full-screen chat."""

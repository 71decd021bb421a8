"""Widgets of the full-screen chat."""

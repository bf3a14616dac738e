"""Drafters: they only ever suggest."""

"""Stands for a library that plugins import."""

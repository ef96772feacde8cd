"""Weights apart from models: read from files by memory map, so that each rank touches only its parts, and written by parts."""

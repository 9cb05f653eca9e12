"""Data sets by name, folders of anybody's images, seeded batches of views."""

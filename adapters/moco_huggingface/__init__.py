"""MoCo for Hugging Face: Accelerate as an engine, as in ``moco-plugins bench --engine accelerate``.

Importing this package imports nothing of Hugging Face; the engine does when it is used.
"""

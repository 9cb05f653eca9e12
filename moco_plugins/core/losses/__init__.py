"""Contrastive losses by name, one a file; each a few lines on :func:`moco_plugins.core.logsumexp.logsumexp`."""

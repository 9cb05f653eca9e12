"""The method on the paper's terms: queue, momentum, InfoNCE, views, and MoCo, which puts them together."""

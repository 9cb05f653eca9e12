"""What judges a backbone, with the harness or without: kNN, linear probe, and the geometry of its features."""

from .features import evaluating, extract_features
from .geometry import alignment, effective_rank, uniformity
from .knn import knn_accuracy
from .probe import PROBE_C, few_labels, linear_probe

__all__ = [
    "PROBE_C",
    "alignment",
    "effective_rank",
    "evaluating",
    "extract_features",
    "few_labels",
    "knn_accuracy",
    "linear_probe",
    "uniformity",
]

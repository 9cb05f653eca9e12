"""What judges a backbone, with the harness or without: kNN, linear probe, fine-tuning, and the geometry of its features."""

from .checks import labelled
from .features import evaluating, extract_features
from .finetune import finetune
from .geometry import alignment, effective_rank, uniformity
from .knn import knn_accuracy, knn_mean_average_precision, nearest
from .metrics import average_precisions, balanced_accuracy, confusion, macro_auroc, mean_average_precision
from .probe import PROBE_C, Probe, few_labels, linear_probe, probe
from .robustness import CORRUPTIONS, expected_calibration_error

__all__ = [
    "CORRUPTIONS",
    "PROBE_C",
    "Probe",
    "alignment",
    "average_precisions",
    "balanced_accuracy",
    "confusion",
    "effective_rank",
    "evaluating",
    "expected_calibration_error",
    "extract_features",
    "few_labels",
    "finetune",
    "knn_accuracy",
    "knn_mean_average_precision",
    "labelled",
    "linear_probe",
    "macro_auroc",
    "mean_average_precision",
    "nearest",
    "probe",
    "uniformity",
]

"""Our types in MMEngine's registries: name -> (registry, where it is). Data only, so that nothing is imported early."""

from __future__ import annotations

#: In configs they are written with the scope ``moco_plugins.`` in front.
TYPES: dict[str, tuple[str, str]] = {
    "MoCo": ("MODELS", "models:MoCo"),
    "MoCoLoss": ("MODELS", "loss:MoCoLoss"),
    "Backbone": ("MODELS", "backbone:Backbone"),
    "DataPreprocessor": ("MODELS", "batches:DataPreprocessor"),
    "TwoViews": ("TRANSFORMS", "transforms:TwoViews"),
    "ImageDataset": ("DATASETS", "data:ImageDataset"),
    "KNNMetric": ("METRICS", "metrics:KNNMetric"),
    "LinearProbeMetric": ("METRICS", "metrics:LinearProbeMetric"),
    "MethodHook": ("HOOKS", "hooks:MethodHook"),
    "LARS": ("OPTIMIZERS", "lars:LARS"),
    "AutocastOptimWrapper": ("OPTIM_WRAPPERS", "precision:AutocastOptimWrapper"),
}

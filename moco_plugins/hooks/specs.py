"""What can be plugged into moco-plugins: one function per hook.

A plugin is a module (or object) with functions of these names, marked with :data:`moco_plugins.hookimpl`, and an
entry point in the group ``moco_plugins``. Hooks that build return ``None`` for a name that is not theirs.
No hook has default arguments; a plugin may leave out arguments it does not need. Where it has an attribute ``PARTS``
(hook -> the names it answers to), lists and errors show them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from ..checkpoints import Format
    from ..core.contrast import ContrastiveLoss
    from ..core.momentum import MomentumRule
    from ..sizes import Size
    from .engine import Adapter

PROJECT = "moco_plugins"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def moco_build_queue(name: str, size: int, dim: int, options: Mapping[str, Any]) -> nn.Module | None:
    """Build the dictionary of keys called ``name``; called by :class:`moco_plugins.MoCo` when it is constructed.

    Return a module with the interface of :class:`moco_plugins.KeyQueue` (``enqueue(keys)``, ``negatives()``,
    ``size``, ``dim``), or None. Built in: ``ring``.
    """


@hookspec
def moco_build_momentum(name: str, options: Mapping[str, Any]) -> MomentumRule | None:
    """Build the rule that moves the key encoder; called by :class:`moco_plugins.MoCo` when it is constructed.

    Return ``rule(key_tensors, query_tensors, momentum)``, which changes ``key_tensors`` in place, or None.
    Built in: ``ema``.
    """


@hookspec
def moco_build_loss(name: str, options: Mapping[str, Any]) -> ContrastiveLoss | None:
    """Build the contrastive loss called ``name``; called by :class:`moco_plugins.MoCo` when it is constructed.

    Return a callable with the arguments of :func:`moco_plugins.info_nce`, or None. Where it takes ``ids`` and
    ``negative_ids``, or ``labels`` and ``negative_labels``, it is given them where they are known; where ``labels`` has no
    default, MoCo's queue remembers labels.
    Built in: ``info_nce``, ``decoupled``, ``debiased``, ``hard``, ``mochi``, ``supcon``, ``ressl``.
    """


@hookspec
def moco_build_views(name: str, image_size: Size, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Build the transform called ``name``: image -> (view, view); called by the harness and the adapters.

    A transform whose attribute ``batched`` is true takes a whole batch of images (N, C, H, W) as well, or instead. One with
    ``crop(image) -> (view, view)`` and ``finish(batch, view) -> batch`` works in two halves, as
    :class:`moco_plugins.TwoViews` does: the first runs where images are loaded, the second on the device.
    ``image_size`` is one number, or (height, width). Return the transform, or None.
    Built in: ``v1``, ``v2``, ``v3`` (the papers) and ``affine`` (small grey images).
    """


@hookspec
def moco_methods() -> Mapping[str, Callable[..., nn.Module]]:
    """Offer self-supervised methods: name -> factory; called when methods are listed or one is asked for by name.

    A factory is called as ``factory(backbone, feature_dim, **options)`` and returns a
    :class:`moco_plugins.hooks.method.Method`. Its keyword arguments are the options that can be set and swept.
    """


@hookspec
def moco_datasets() -> Mapping[str, Callable[..., Any]]:
    """Offer data sets: name -> factory; called when data sets are listed or one is asked for by name.

    A factory is called as ``factory(root)`` (``root``: folder of downloaded data, or None) and returns
    ``(train, test)``, two map-style data sets of ``(image, label)``. What ``train`` may have besides: ``labels``, a tensor,
    which saves opening all images; ``classes``, their names; ``pretrain``, a set of more images to train on than have
    labels; ``whole``, the set that both parts were cut from by :func:`moco_plugins.datasets.train_test`: the harness
    then cuts it anew for each seed. What a factory warns of stands in the report.
    """


@hookspec
def moco_adapters() -> Sequence[Adapter]:
    """Offer training frameworks; called to list engines, to find one by name and to activate one at import.

    Return :class:`moco_plugins.hooks.engine.Adapter` objects: name, what to install, how to activate it, how it trains.
    """


@hookspec
def moco_checkpoint_formats() -> Mapping[str, Format]:
    """Offer formats of checkpoints: name -> :class:`moco_plugins.checkpoints.Format`; called when one is read or written.

    A format reads, writes or both. ``moco-plugins convert --to`` takes the names of those that write.
    """


@hookspec
def moco_report_sections(results: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Add sections to the report of ``moco-plugins bench``; called once, when the report is written.

    ``results`` is the content of results.json. Return ``(title, html)`` pairs, or an empty list.
    """

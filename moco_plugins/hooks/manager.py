"""The plugin manager: who is there, what each provides, and one thin function per hook.

Nobody else touches pluggy. Plugins are found by entry point (group ``moco_plugins``) at first use. One that cannot be
imported gives a warning and the rest work; a misspelt hook and a name claimed twice are errors that name the plugin.
``MOCO_PLUGINS_BLOCK=a,b`` keeps plugins out by name.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from ..sizes import Size
from . import specs
from .activation import blocked, entry_points

if TYPE_CHECKING:
    from torch import nn

    from ..checkpoints import Format
    from ..core.contrast import ContrastiveLoss
    from ..core.momentum import MomentumRule
    from .engine import Adapter


class PluginError(RuntimeError):
    """A plugin is wrong: a misspelt hook, a name claimed twice, an answer that is not what the hook asks for."""


class UnknownNameError(LookupError):
    """Something asked for by name that no plugin provides; the message lists what there is."""


class PluginInfo(NamedTuple):
    """A loaded plugin: its name, where it comes from, the hooks it implements."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the one plugin manager, with all entry points loaded; the built-in parts are one of them."""
    pm = pluggy.PluginManager(specs.PROJECT)
    pm.add_hookspecs(specs)
    for name in blocked():
        pm.set_blocked(name)
    found: dict[str, metadata.EntryPoint] = {}
    for entry_point in entry_points():
        first = found.setdefault(entry_point.name, entry_point)
        if first is entry_point:
            _load(pm, entry_point)
        elif first.value != entry_point.value:
            raise PluginError(
                f"two plugins are called {entry_point.name!r}: {first.value} of {_source(first)} and {entry_point.value} of "
                f"{_source(entry_point)}; uninstall one of the two"
            )
    unknown = sorted(blocked() - found.keys())
    if unknown:
        warnings.warn(
            f"MOCO_PLUGINS_BLOCK={','.join(unknown)}: no installed plugin is called that; there are {', '.join(found)}",
            stacklevel=2,
        )
    return pm


def _source(entry_point: metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "(unknown)"


def _load(pm: pluggy.PluginManager, entry_point: metadata.EntryPoint) -> None:
    if pm.is_blocked(entry_point.name):
        return
    try:
        plugin = entry_point.load()
    except Exception as error:  # a broken plugin must not take the host down, whatever it raises
        warnings.warn(
            f"moco-plugins: plugin {entry_point.name!r} of {_source(entry_point)} could not be loaded and is left out: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return
    if not pm.is_registered(plugin):
        register(plugin, entry_point.name, pm)


def register(plugin: object, name: str, pm: pluggy.PluginManager | None = None) -> None:
    """Register a plugin by hand (a module or object with hook implementations).

    Raises:
        PluginError: one of its hooks does not exist or asks for arguments that the hook has not.
    """
    pm = pm or manager()
    try:
        pm.register(plugin, name)
        pm.check_pending()
    except pluggy.PluginValidationError as error:
        if pm.has_plugin(name):
            pm.unregister(name=name)
        known = ", ".join(sorted(n for n in vars(specs) if n.startswith("moco_")))
        reason = " ".join(str(error).split())
        raise PluginError(f"plugin {name!r}: {reason}. The hooks are: {known}") from error


def unregister(name: str) -> None:
    """Remove a plugin by name."""
    manager().unregister(name=name)


def list_plugins() -> list[PluginInfo]:
    """List the loaded plugins with their distribution, version and hooks."""
    pm = manager()
    sources = {}
    for entry_point in entry_points():
        if entry_point.dist is not None:
            sources[entry_point.name] = (entry_point.dist.name, entry_point.dist.version)
    own = ("moco-plugins", metadata.version("moco-plugins"))
    infos = []
    for name, plugin in pm.list_name_plugin():
        if plugin is None:  # blocked
            continue
        distribution, version = own if _is_ours(plugin) else sources.get(name, ("registered by hand", ""))
        hooks = tuple(sorted(caller.name for caller in pm.get_hookcallers(plugin) or ()))
        infos.append(PluginInfo(name, distribution, version, hooks))
    return sorted(infos, key=lambda info: (info.name != "builtin", info.name))


def _each(hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """Call ``hook`` plugin by plugin: (plugin name, answer), answers of None left out."""
    pm = manager()
    everybody = [plugin for _, plugin in pm.list_name_plugin() if plugin is not None]
    answers = []
    for name, plugin in pm.list_name_plugin():
        callers = pm.get_hookcallers(plugin) if plugin is not None else None
        if any(caller.name == hook for caller in callers or ()):
            only = pm.subset_hook_caller(hook, [other for other in everybody if other is not plugin])
            try:
                answers += [(name, answer) for answer in only(**arguments) if answer is not None]
            except Exception as error:
                if _is_ours(plugin):
                    raise
                raise PluginError(f"plugin {name!r}: its {hook} raised {type(error).__name__}: {error}") from error
    return answers


def _is_ours(plugin: object) -> bool:
    return getattr(plugin, "__name__", "").startswith(f"{specs.PROJECT}.")


def _build(hook: str, kind: str, name: str, **arguments: Any) -> Any:
    answers = _each(hook, name=name, **arguments)
    if not answers:
        raise UnknownNameError(f"{kind}={name!r}: no plugin provides it. {_who_builds(hook)}")
    if len(answers) > 1:
        raise PluginError(_twice(kind, name, [plugin for plugin, _ in answers]))
    return answers[0][1]


def part_names(plugin: str, hook: str) -> tuple[str, ...]:
    """The names that a plugin answers to in a building hook, where it tells them in an attribute ``PARTS``."""
    return tuple(getattr(manager().get_plugin(plugin), "PARTS", {}).get(hook, ()))


def _who_builds(hook: str) -> str:
    builders = [info.name for info in list_plugins() if hook in info.hooks]
    if not builders:
        return (
            f"No plugin with {hook} is loaded, not even the built-in one: unless MOCO_PLUGINS_BLOCK keeps it out, the "
            "installed package is older than this code. Install it again: pip install moco-plugins, or pip install -e ."
        )
    names = {builder: part_names(builder, hook) for builder in builders}
    told = "; ".join(
        f"{'Built in' if name == 'builtin' else f'From plugin {name}'}: {', '.join(parts)}"
        for name, parts in names.items()
        if parts
    )
    others = ", ".join(name for name, parts in names.items() if not parts) or "none"
    return f"{told}; other plugins with {hook}, whose documentation has their names: {others}"


def _twice(kind: str, name: str, plugin_names: list[str]) -> str:
    both = " and ".join(repr(plugin) for plugin in plugin_names)
    return (
        f"{kind} {name!r} is provided by two plugins, {both}; keep one out with MOCO_PLUGINS_BLOCK={plugin_names[-1]}"
    )


def _collect(hook: str, kind: str) -> dict[str, tuple[str, Any]]:
    """Merge the mappings that plugins offer: name -> (plugin, value)."""
    merged: dict[str, tuple[str, Any]] = {}
    for plugin, offered in _each(hook):
        for name, value in offered.items():
            if name in merged:
                raise PluginError(_twice(kind, name, [merged[name][0], plugin]))
            merged[name] = (plugin, value)
    return dict(sorted(merged.items()))


def _pick(table: Mapping[str, tuple[str, Any]], kind: str, name: str) -> Any:
    if name not in table:
        known = ", ".join(f"{n} ({plugin})" for n, (plugin, _) in table.items()) or "none"
        close = difflib.get_close_matches(name.lower(), table, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UnknownNameError(f"{kind}={name!r} is not known.{hint} There are (plugin in brackets): {known}")
    return table[name][1]


def build_queue(name: str, size: int, dim: int, options: Mapping[str, Any]) -> nn.Module:
    """Build the queue called ``name``."""
    return _build("moco_build_queue", "queue", name, size=size, dim=dim, options=options)


def build_momentum(name: str, options: Mapping[str, Any]) -> MomentumRule:
    """Build the momentum rule called ``name``."""
    return _build("moco_build_momentum", "momentum_rule", name, options=options)


def build_loss(name: str, options: Mapping[str, Any]) -> ContrastiveLoss:
    """Build the contrastive loss called ``name``."""
    return _build("moco_build_loss", "loss", name, options=options)


def build_views(name: str, image_size: Size, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Build the two-view transform called ``name``."""
    return _build("moco_build_views", "views", name, image_size=image_size, options=options)


def methods() -> dict[str, tuple[str, Callable[..., nn.Module]]]:
    """All methods: name -> (plugin, factory)."""
    return _collect("moco_methods", "method")


def method_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of one method, or an error that lists all."""
    return _pick(methods(), "method", name)


def datasets() -> dict[str, tuple[str, Callable[..., Any]]]:
    """All data sets: name -> (plugin, factory)."""
    return _collect("moco_datasets", "data set")


def dataset_factory(name: str) -> Callable[..., Any]:
    """The factory of one data set, or an error that lists all."""
    return _pick(datasets(), "data", name)


def adapters() -> dict[str, tuple[str, Adapter]]:
    """All adapters: name -> (plugin, adapter)."""
    table: dict[str, tuple[str, Adapter]] = {}
    for plugin, offered in _each("moco_adapters"):
        for adapter in offered:
            if adapter.name in table:
                raise PluginError(_twice("adapter", adapter.name, [table[adapter.name][0], plugin]))
            table[adapter.name] = (plugin, adapter)
    return dict(sorted(table.items()))


def adapter(name: str) -> Adapter:
    """One adapter by name, or an error that lists all."""
    return _pick(adapters(), "engine", name)


def checkpoint_formats() -> dict[str, tuple[str, Format]]:
    """All formats of checkpoints: name -> (plugin, format)."""
    return _collect("moco_checkpoint_formats", "checkpoint format")


def checkpoint_format(name: str) -> Format:
    """One format by name, or an error that lists all."""
    return _pick(checkpoint_formats(), "format", name)


def report_sections(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Further sections of the report, from all plugins."""
    return [section for _, offered in _each("moco_report_sections", results=results) for section in offered]

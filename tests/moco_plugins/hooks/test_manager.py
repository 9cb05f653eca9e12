"""Plugins: who is there, who provides what, and what happens when one is wrong. Real entry points, fresh processes."""

import inspect
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

import moco_plugins
from moco_plugins import hookimpl
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks import specs as hookspecs

RECIPES = Path(__file__).parents[3] / "recipes" / "plugins"
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("moco_"))


def install_module(folder: Path, name: str, source: str, entry_point: str | None = None) -> None:
    """Put a module and the metadata of an installed distribution into a folder, as pip does."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"dist_of_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-of-{name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[moco_plugins]\n{entry_point or name} = {name}\n")


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        timeout=120,
    )


def test_entry_points_are_those_that_importlib_lists(tmp_path):
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        install_module(folder, "shadowed", "")
    install_module(tmp_path / "second", "alone", "")
    (tmp_path / "first" / "dist_of_shadowed-1.2.dist-info" / "entry_points.txt").write_text(
        "[other]\nmoco_plugins = shadowed\n"
    )
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'first')!r}, {str(tmp_path / 'second')!r}]\n"
        "from importlib import metadata\n"
        "from moco_plugins.hooks.activation import GROUP, entry_points\n"
        "print(list(entry_points()) == list(metadata.entry_points(group=GROUP)), [e.name for e in entry_points()])"
    )
    result = run(tmp_path, code)
    assert result.stdout.startswith("True"), result.stdout + result.stderr
    assert "alone" in result.stdout
    assert "shadowed" not in result.stdout, "Python imports the first of two distributions of one name"


def test_builtin_and_adapters_are_plugins_with_distribution_and_version():
    infos = {info.name: info for info in plugins.list_plugins()}
    assert {"builtin", "lightly", "mmengine"} <= set(infos)
    for name in ("builtin", "lightly", "mmengine"):
        assert infos[name].distribution == "moco-plugins"
        assert infos[name].version == moco_plugins.__version__
    assert "moco_methods" in infos["builtin"].hooks
    assert infos["mmengine"].hooks == ("moco_adapters", "moco_checkpoint_formats")
    assert plugins.methods()["moco-v2"][0] == "builtin"
    assert plugins.methods()["byol"][0] == "lightly"
    assert {"lightning", "mmengine"} <= set(plugins.adapters())


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_typed_documented_and_without_defaults(hook):
    function = getattr(hookspecs, hook)
    signature = inspect.signature(function)
    assert all(p.default is inspect.Parameter.empty for p in signature.parameters.values())
    assert signature.return_annotation is not inspect.Signature.empty
    assert "called" in function.__doc__, "each hook says when it is called"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_in_the_readme_with_its_signature(hook):
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    parameters = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"{hook}({parameters})" in readme


def test_a_plugin_by_entry_point_is_found_and_named(tmp_path):
    install_module(
        tmp_path,
        "extra",
        "from moco_plugins import hookimpl\n"
        "@hookimpl\ndef moco_build_loss(name):\n    return (lambda *a, **k: 'mine') if name == 'mine' else None\n",
    )
    code = (
        "from moco_plugins import plugins\n"
        "print(plugins.build_loss('mine', {})())\n"
        "print([i for i in plugins.list_plugins() if i.name == 'extra'][0])"
    )
    result = run(tmp_path, code)
    assert result.stdout.splitlines()[0] == "mine", result.stderr
    assert "dist-of-extra" in result.stdout
    assert "1.2" in result.stdout


def test_a_plugin_that_cannot_be_imported_is_named_and_the_rest_work(tmp_path):
    install_module(tmp_path, "broken", "raise OSError('no such device')")
    result = run(tmp_path, "from moco_plugins import plugins; print(sorted(plugins.methods()))")
    assert "moco-v2" in result.stdout, result.stderr
    assert result.stderr.count("UserWarning") == 1
    for word in ("broken", "dist-of-broken", "OSError", "no such device"):
        assert word in result.stderr


def test_a_misspelt_hook_is_an_error_that_names_the_plugin(tmp_path):
    install_module(
        tmp_path, "typo", "from moco_plugins import hookimpl\n@hookimpl\ndef moco_methdos():\n    return {}\n"
    )
    result = run(tmp_path, "from moco_plugins import plugins; plugins.methods()")
    assert result.returncode != 0
    for word in ("typo", "moco_methdos", "moco_methods"):
        assert word in result.stderr.splitlines()[-1]


def test_a_wrong_hook_argument_is_an_error_that_names_the_plugin(tmp_path):
    install_module(
        tmp_path, "odd", "from moco_plugins import hookimpl\n@hookimpl\ndef moco_build_loss(nmae):\n    return None\n"
    )
    result = run(tmp_path, "from moco_plugins import plugins; plugins.methods()")
    assert result.returncode != 0
    assert "odd" in result.stderr.splitlines()[-1]


def test_two_plugins_with_one_name_are_both_named_and_one_can_be_blocked(tmp_path):
    source = "from moco_plugins import hookimpl\n@hookimpl\ndef moco_methods():\n    return {'same': dict}\n"
    source += "@hookimpl\ndef moco_build_loss(name):\n    return dict if name == 'same' else None\n"
    install_module(tmp_path, "one", source)
    install_module(tmp_path, "two", source)
    for call in ("plugins.method_factory('same')", "plugins.build_loss('same', {})"):
        result = run(tmp_path, f"from moco_plugins import plugins; {call}")
        last = result.stderr.splitlines()[-1]
        assert "PluginError" in last, result.stderr
        assert "'one'" in last
        assert "'two'" in last
        result = run(tmp_path, f"from moco_plugins import plugins; {call}", MOCO_PLUGINS_BLOCK="two")
        assert result.returncode == 0, result.stderr


def test_two_plugins_called_the_same_are_an_error_that_names_both_sources(tmp_path):
    source = "from moco_plugins import hookimpl\n"
    install_module(tmp_path, "one", source, entry_point="same")
    install_module(tmp_path, "two", source, entry_point="same")
    last = run(tmp_path, "from moco_plugins import plugins; plugins.methods()").stderr.splitlines()[-1]
    for word in ("PluginError", "'same'", "dist-of-one", "dist-of-two"):
        assert word in last


def test_blocking_an_adapter_takes_its_names_away(tmp_path):
    result = run(
        tmp_path,
        "from moco_plugins import plugins; print(sorted(plugins.adapters()))",
        MOCO_PLUGINS_BLOCK="mmengine, nobody",
    )
    assert result.stdout.strip() == "['accelerate', 'lightning']", result.stderr


def test_blocking_a_plugin_that_is_not_there_is_reported(tmp_path):
    result = run(tmp_path, "from moco_plugins import plugins; plugins.methods()", MOCO_PLUGINS_BLOCK="mmengin,lightly")
    assert "MOCO_PLUGINS_BLOCK=mmengin: no installed plugin is called that; there are" in result.stderr
    assert result.returncode == 0
    result = run(tmp_path, "from moco_plugins import plugins; plugins.methods()", MOCO_PLUGINS_BLOCK="lightly")
    assert result.stderr == ""


def test_unknown_names_list_what_there_is_and_whose():
    with pytest.raises(plugins.UnknownNameError, match=r"method='moco-v9'.*moco-v2 \(builtin\).*simclr \(lightly\)"):
        plugins.method_factory("moco-v9")
    with pytest.raises(
        plugins.UnknownNameError, match=r"engine='horovod'.*lightning \(lightly\).*mmengine \(mmengine\)"
    ):
        plugins.adapter("horovod")
    with pytest.raises(plugins.UnknownNameError, match=r"data='mnist6k'.*mnist5k \(builtin\)"):
        plugins.dataset_factory("mnist6k")
    with pytest.raises(plugins.UnknownNameError, match="queue='lifo'"):
        plugins.build_queue("lifo", 8, 4, {})


def test_a_plugin_registered_by_hand():
    class Plugin:
        @hookimpl
        def moco_build_views(self, name, image_size):
            return (lambda image: (image, image_size)) if name == "by-hand" else None

    plugins.register(Plugin(), "by-hand")
    try:
        assert plugins.build_views("by-hand", 7, {})(1) == (1, 7)
    finally:
        plugins.unregister("by-hand")
    with pytest.raises(plugins.UnknownNameError):
        plugins.build_views("by-hand", 7, {})


def test_nothing_private_of_pluggy_is_used():
    package = Path(moco_plugins.__file__).parent
    assert not [path for path in package.rglob("*.py") if "pluggy._" in path.read_text()]
    assert pluggy.__version__ >= "1.6"


def test_a_half_imported_plugin_is_not_loaded(tmp_path):
    """A plugin module that is imported first imports moco_plugins, which must not load it before it is complete."""
    install_module(
        tmp_path,
        "selfish",
        "import mmengine\nfrom moco_plugins import hookimpl\n"
        "@hookimpl\ndef moco_methods():\n    return {'selfish': dict}\n",
    )
    result = run(tmp_path, "import selfish; from moco_plugins import plugins; print('selfish' in plugins.methods())")
    assert result.stdout.strip() == "True", result.stderr


def test_with_the_oldest_pluggy_that_is_supported(tmp_path):
    oldest = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "pluggy==1.6.0"]
    subprocess.run(oldest, check=True, capture_output=True, timeout=120)
    install_module(
        tmp_path,
        "extra",
        "from moco_plugins import hookimpl\n"
        "@hookimpl\ndef moco_build_loss(name):\n    return (lambda *a: 'mine') if name == 'mine' else None\n"
        "@hookimpl\ndef moco_methods():\n    return {'extra': dict}\n",
    )
    code = (
        "import pluggy; from moco_plugins import plugins\n"
        "print(pluggy.__version__, plugins.build_loss('mine', {})(), plugins.methods()['extra'][0])\n"
        "plugins.build_queue('ring', 4, 2, {}); plugins.build_momentum('ema', {}); plugins.build_views('v2', 8, {})\n"
        "print(sorted(plugins.adapters()), 'mnist5k' in plugins.datasets(), plugins.report_sections({}))"
    )
    result = run(tmp_path, code)
    assert result.stdout.splitlines() == ["1.6.0 mine extra", "['accelerate', 'lightning', 'mmengine'] True []"], (
        result.stderr
    )


def test_a_hook_that_raises_is_reported_with_the_plugins_name():
    class Plugin:
        @hookimpl
        def moco_build_loss(self, name):
            raise KeyError("temprature")

    plugins.register(Plugin(), "raises")
    try:
        with pytest.raises(
            plugins.PluginError, match=r"plugin 'raises': its moco_build_loss raised KeyError: 'tempr"
        ) as caught:
            plugins.build_loss("info_nce", {})
        assert isinstance(caught.value.__cause__, KeyError)
    finally:
        plugins.unregister("raises")
    with pytest.raises(TypeError, match="temprature"):  # the built-in parts' own errors say enough
        plugins.build_queue("ring", 8, 4, {"temprature": 1})

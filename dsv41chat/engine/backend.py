"""Whether an MLX back end can be imported here, and what to install when it cannot. Imports MLX only when asked."""

from __future__ import annotations

import sys

from dsv41chat.engine.errors import BackendMissing


def install_command(platform: str = sys.platform) -> str:
    """The one `pip install` command that gives this platform a back end."""
    if platform == "darwin":
        return "pip install mlx"
    return "pip install 'dsv41chat[cpu]'   (or dsv41chat[cuda12], dsv41chat[cuda13])"


def backend_problem() -> str | None:
    """Why no back end can be used, with the install command; None if one seems to be there. Imports nothing heavy."""
    from importlib.util import find_spec

    try:
        found = find_spec("mlx.core") is not None
    except ImportError:  # not even the parent package
        found = False
    return None if found else f"No MLX back end is installed. Run: {install_command()}"


def require_backend() -> None:
    """Raise BackendMissing, with the install command in its message, unless `mlx.core` can be imported."""
    try:
        import mlx.core  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: the wheel is there, a shared library it needs is not
        raise BackendMissing(f"No MLX back end is installed ({error}). Run: {install_command()}", hint=install_command()) from error


def backend_info() -> tuple[str, str]:
    """(device, MLX version): device is `cpu` or the GPU's name. Call it on the engine thread. Raises BackendMissing."""
    require_backend()
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu", mx.__version__
    return str(mx.device_info().get("device_name", "gpu")), mx.__version__

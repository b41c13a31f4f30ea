"""Which Phalanx this is."""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """There is no package to name: it is installed from where the user has it."""
    return f"pip install 'phalanx[{extra}] @ URL', URL being its wheel (file:///...) or repository (git+https://...)"

"""Stands in for SGLang's compiled kernels on a machine without an accelerator: every import succeeds, every call is an error.

SGLang imports a few CPU kernels by name when it runs on a CPU; a plain decoder's forward pass calls none of them.
"""

__version__ = "0.4.10"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_arguments: object, **_settings: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs the compiled kernels, which a CPU test environment does not have")

    return refuse

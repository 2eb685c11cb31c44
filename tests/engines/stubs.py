"""Lets an engine be imported without the packages that its balancing does not use.

A missing top-level package becomes an empty one, whose attributes are made when asked for.
"""

import importlib.abc
import importlib.machinery
import sys
import types

MISSING = frozenset(
    {
        "IPython",
        "av",
        "compressed_tensors",
        "cv2",
        "flashinfer",
        "gguf",
        "librosa",
        "llguidance",
        "mistral_common",
        "pandas",
        "partial_json_parser",
        "scipy",
        "sentencepiece",
        "soundfile",
        "tiktoken",
        "torchaudio",
        "torchvision",
        "tvm_ffi",
        "xgrammar",
    }
)


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls


def _made(name):
    return _Meta(
        name,
        (),
        {
            "__init__": lambda self, *args, **named: None,
            "__get_pydantic_core_schema__": classmethod(lambda cls, *_: {"type": "any"}),
            "__class_getitem__": classmethod(lambda cls, item: cls),
            "__call__": lambda self, *args, **named: (
                args[0] if args and callable(args[0]) else self
            ),
        },
    )


class _Package(types.ModuleType):
    __version__ = "0"

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _made(name))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in MISSING or not isinstance(sys.modules.get(top), _Package | None):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Stand in for the packages of `MISSING` that are not installed.

    Older releases of engines register models that transformers has by now.
    """
    sys.meta_path.append(_Finder())
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = staticmethod(
        lambda model_type, config, **_named: register(model_type, config, exist_ok=True)
    )

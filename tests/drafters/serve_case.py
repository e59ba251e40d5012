"""One engine in a process of its own: `serve_case.py case.json result.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(case_file: Path, result_file: Path) -> None:
    """Answer a case's prompts greedily, to `tokens` tokens each."""
    from vllm import LLM, SamplingParams

    from eaglenest.engine.arguments import EngineSpec, engine_arguments

    case = json.loads(case_file.read_text())
    engine = LLM(**engine_arguments(EngineSpec(**case["engine"])))
    sampling = SamplingParams(temperature=0.0, max_tokens=case["tokens"], ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": p} for p in case["prompts"]], sampling, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    result = [{"ids": list(a.token_ids), "accepted": a.spec_decode_metrics.per_step_accepted} for a in answers]
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

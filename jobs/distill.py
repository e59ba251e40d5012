"""Distill a drafter: the entry point for `ray job submit`, a thin shell over `eaglenest.pipeline.raise_drafter`.

    ray job submit --address http://127.0.0.1:8265 --working-dir . --runtime-env jobs/runtime_env.yaml \
        -- python jobs/distill.py --name first --from-nothing
"""

from eaglenest.cli.distill_job import main

if __name__ == "__main__":
    main()

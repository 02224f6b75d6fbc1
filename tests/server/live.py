"""A server for tests: prints its URL once it listens. `python -m tests.server.live [--model smollm2] ...`"""

import argparse
import gc
import json
import threading
from typing import Any

from chairlift.server import create_app, serve
from tests.server import toy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["toy", "smollm2"], default="toy")
    parser.add_argument("--config", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--drain-timeout", type=float, default=60.0)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each forward pass takes longer")
    args = parser.parse_args()
    manager, tokenizer = (toy.smollm2 if args.model == "smollm2" else toy.manager)(**args.config)
    app = create_app(manager, tokenizer, model_name="toy")
    add_switches(app, manager, args.slow)
    serve(app, port=0, drain_timeout=args.drain_timeout, log_level="warning", ready=lambda url: print(url, flush=True))
    manager.stop(hard_stop=True)
    print(json.dumps(state(app, manager)), flush=True)


def state(app: Any, manager: Any) -> dict[str, int]:
    """What must be zero when nobody is served."""
    stats, router = manager.stats(), manager._router
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "used_blocks": stats.used_blocks,
        "calls": app.state.service.num_calls,
        "handlers": len(router._handlers),
        "expected": len(router._expected),
        "outputs": len(router._outputs),
        "filters": len(manager._filters),
    }


def add_switches(app: Any, manager: Any, slow: float) -> None:
    """Routes for tests only: how the server is, what garbage collection skips, a fault in the engine's next step."""
    step, failing = manager._engine.step, threading.Event()
    pause = threading.Event()

    def stepped() -> Any:
        if failing.is_set():
            raise RuntimeError("a fault that a test asked for")
        if slow:
            pause.wait(slow)
        return step()

    manager._engine.step = stepped

    @app.get("/test/state")
    async def show() -> dict[str, int]:
        return state(app, manager)

    @app.get("/test/frozen")
    async def frozen() -> int:
        return gc.get_freeze_count()

    @app.post("/test/crash")
    async def crash() -> None:
        failing.set()


if __name__ == "__main__":
    main()

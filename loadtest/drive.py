"""The load generator: reads an order from standard input, and writes one record per line to standard output.

    python -m loadtest.drive

The last line is the CPU usage of the load generator, as a ratio of a core. A ratio near 1 means that it was too slow.

`loadtest.run` starts it as a separate process, because Locust patches sockets and runs greenlets.
"""

import os
import random
import resource
import sys
import time
from functools import partial
from typing import BinaryIO

import gevent
import msgspec
from gevent.pool import Pool
from locust.env import Environment

from loadtest.asking import Asker
from loadtest.load_plan import arrivals, level_at
from loadtest.locustfile import ChatUser
from loadtest.record import Order, Record

TICK_S = 0.1
MAX_OPEN = 2000  # concurrent requests of an open loop; further requests wait, and their latencies include the wait


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # The limit on open files is usually 1,024, less than MAX_OPEN.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # standard output is for records only
    asker = Asker(order, partial(write, out))
    began_at, used_s = time.perf_counter(), time.process_time()
    if order.plan.loop == "open":
        run_open_loop(asker)
    else:
        run_closed_loop(asker)
    write(out, (time.process_time() - used_s) / (time.perf_counter() - began_at))


def write(out: BinaryIO, line: Record | float) -> None:
    out.write(msgspec.json.encode(line) + b"\n")
    out.flush()


def run_closed_loop(asker: Asker) -> None:
    """Run Locust users. Their number follows the plan. Each user waits for its answer."""
    plan = asker.order.plan
    ChatUser.asker = asker
    environment = Environment(user_classes=[ChatUser], stop_timeout=asker.order.target.timeout_s)
    runner = environment.create_local_runner()
    num_users = -1
    while (now := asker.now()) < plan.duration_s:
        if (wanted := round(level_at(plan, now))) != num_users:
            num_users = wanted
            runner.start(num_users, spawn_rate=max(plan.levels))
        gevent.sleep(min(TICK_S, plan.duration_s - now))
    runner.stop()


def run_open_loop(asker: Asker) -> None:
    """Send requests at their planned times, whether or not earlier requests are answered."""
    seed = asker.order.workload.seed
    pool = Pool(MAX_OPEN)
    for number, intended_at in enumerate(arrivals(asker.order.plan, random.Random(seed))):
        gevent.sleep(max(0.0, intended_at - asker.now()))
        draw = random.Random(f"{seed} {number}")
        pool.spawn(asker.ask, asker.choose_scenario(draw), draw, intended_at)
    pool.join(timeout=asker.order.target.timeout_s)
    pool.kill()


if __name__ == "__main__":
    main()

"""Runs programs in forks of one process that has imported torch and the project: imports take longer than most programs."""

import json
import os
import signal
import sys
import traceback

from .programs import run_and_exit


def serve(printed: str) -> None:
    """Run a program in a fork for each line of stdin, [name, arguments, NULLGPU_READS], and print its exit code.

    This process itself must not use the device. What a program prints goes to the file `printed`.
    """
    for line in sys.stdin:
        name, arguments, reads = json.loads(line)
        if not (child := os.fork()):
            signal.alarm(500)  # ends a program that hangs
            file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, sys.stdout.fileno())
            os.dup2(file, sys.stderr.fileno())
            os.environ["NULLGPU_READS"] = reads
            try:
                run_and_exit(name, arguments)
            except BaseException:  # SystemExit, too: the fork must not continue with the next line
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])

"""One process of a sweep: its output, its end, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from python_path import ROOT, python_path

from fusedmlp.signals import Signals
from fusedmlp.sweep.job import Ended, Started, environment_of, run_process

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"


def job(log: Path, code: str, received=(), show=lambda line: None, **limits) -> Ended:
    return run_process(Started([sys.executable, "-c", code], os.environ), log, show, received, **limits)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def test_output_goes_line_by_line_to_the_terminal_and_as_it_is_to_the_log(tmp_path):
    code = "import sys; print('a'); print('b', file=sys.stderr, flush=True); sys.stdout.write('c'); sys.exit(3)"
    lines = []
    ended = job(tmp_path / "log", code, show=lines.append)
    assert (ended.exit_code, ended.timed_out) == (3, False)
    assert sorted(lines) == ["a", "b", "c"]
    assert ended.last_line == lines[-1]
    assert sorted((tmp_path / "log").read_text()) == sorted("a\nb\nc")


@pytest.mark.parametrize(("before", "number"), [("0", signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_the_time_limit_ends_a_job_and_kills_one_that_does_not_listen(tmp_path, before, number):
    ended = job(tmp_path / "log", f"{before}; {SLEEP}", timeout_s=1.0, grace_s=0.3)
    assert ended.timed_out
    assert ended.exit_code == -number
    assert 1.0 <= ended.seconds < 20


def test_the_first_signal_is_handed_on_and_the_third_kills(tmp_path):
    with Signals() as signals:
        own = signal.getsignal(signal.SIGINT)
        ended = job(tmp_path / "log", SLEEP, signals.received, lambda line: os.kill(os.getpid(), signal.SIGTERM))
        assert ended.exit_code == -signal.SIGTERM
        assert signals.received == [signal.SIGTERM]

    def thrice(line: str) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    with Signals() as signals:
        assert job(tmp_path / "log", f"{STUBBORN}; {SLEEP}", signals.received, thrice).exit_code == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) != own


def test_a_line_without_end_is_passed_on_in_parts_and_of_a_progress_bar_the_last(tmp_path):
    code = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n' + 'a\\rb\\rc\\r\\n' + 'end')"
    lines = []
    job(tmp_path / "log", code, show=lines.append)
    assert max(map(len, lines[:-2])) < 2_000_000
    assert sum(map(len, lines[:-2])) == 3_000_000
    assert lines[-2:] == ["c", "end"]


def test_a_job_goes_on_without_a_log(tmp_path):
    lines = []
    assert job(tmp_path / "no such directory" / "log", "print('a')", show=lines.append).exit_code == 0
    assert lines == ["a"]


def test_what_left_the_job_and_writes_for_ever_is_left(tmp_path):
    code = "import subprocess; subprocess.Popen(['yes'], start_new_session=True)"
    assert job(tmp_path / "log", code).seconds < 30


def test_what_a_job_leaves_running_is_ended(tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    lines = []
    assert job(tmp_path / "log", code, show=lines.append).exit_code == 0
    assert gone(int(lines[0]), 5)


def test_a_job_ends_when_its_output_cannot_be_shown(tmp_path):
    def show(line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError, match=r"^\d+$") as caught:
        job(tmp_path / "log", "import os; print(os.getpid(), flush=True); " + SLEEP, show=show)
    assert gone(int(str(caught.value)), 5)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no signal for the death of a parent")
def test_a_job_does_not_outlive_a_sweep_that_is_killed():
    child = (
        f"from fusedmlp.sweep.job import join_sweep; import os; print(join_sweep(), os.getpid(), flush=True); {SLEEP}"
    )
    code = (
        "import subprocess, sys, time; from fusedmlp.sweep.job import environment_of; "
        f"command = [sys.executable, '-c', {child!r}]; "
        "subprocess.Popen(command, env=environment_of('day-sweep'), start_new_session=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as sweep:
        group, pid = sweep.stdout.readline().split()
        assert group == "day-sweep"
        assert alive(int(pid))
        sweep.kill()
    assert gone(int(pid), 10)


def test_a_jobs_environment_names_its_sweep_and_shares_no_service(monkeypatch):
    monkeypatch.setenv("WANDB_SERVICE", "3-1234-tcp-localhost-5678")
    found = environment_of("day-sweep")
    assert found["FUSEDMLP_SWEEP_GROUP"] == "day-sweep"
    assert "WANDB_SERVICE" not in found
    assert found["PATH"] == os.environ["PATH"]


def test_a_crash_leaves_a_traceback_in_the_log(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    ended = run_process(Started([sys.executable, "-c", code], environment_of("x")), tmp_path / "log", lambda _: None)
    assert ended.exit_code == -signal.SIGSEGV
    assert 'File "<string>", line 1' in (tmp_path / "log").read_text()


HELD = """
import os, sys
from fusedmlp.sweep.job import GATE, wait_until_let_go
print("imported", flush=True)
waited = wait_until_let_go()
print("begun", waited > 0.5, GATE in os.environ, flush=True)
"""


def held(code: str = HELD) -> Started:
    return Started([sys.executable, "-c", code], os.environ | {"PYTHONPATH": python_path()}, held=True)


def test_a_held_job_begins_when_it_is_let_go(tmp_path):
    started, lines = held(), []
    os.read(started.process.stdout.fileno(), 100)  # it has imported
    assert started.waits(20)
    time.sleep(0.8)
    assert started.process.poll() is None
    ended = run_process(started, tmp_path / "log", lines.append, timeout_s=20)
    assert (ended.exit_code, lines) == (0, ["begun True False"])


def test_a_held_job_that_is_withdrawn_leaves_nothing():
    for code in (HELD, f"{STUBBORN}; {SLEEP}"):
        started = held(code)
        os.read(started.process.stdout.fileno(), 100)
        assert started.waits(1) is (code == HELD)
        started.withdraw()
        assert gone(started.process.pid, 0.0)


def test_a_job_that_ended_before_its_turn_is_seen_to_have_ended(tmp_path):
    started = held("raise SystemExit('no such module')")
    started.process.wait()
    assert started.waits(0)
    ended = run_process(started, tmp_path / "log", lambda _: None)
    assert (ended.exit_code, ended.last_line) == (1, "no such module")


def test_a_held_job_ends_with_the_process_that_holds_it():
    code = f"""
import os, sys, time
from fusedmlp.sweep.job import Started
started = Started([sys.executable, "-c", {HELD!r}], os.environ, held=True)
os.read(started.process.stdout.fileno(), 100)
print(started.process.pid, flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE, text=True
    )
    pid = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert gone(pid, 10)

"""A real Slurm cluster of several nodes on this machine, for tests: each node a network namespace with its own name.

Everything lives in namespaces of its own (network, mounts, processes), so that leaving nothing behind is the kernel's
work: when the first process ends, all others do. Needs root and the packages slurmctld, slurmd, slurm-client, munge
and iproute2.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "ip", "unshare", "nsenter")
NUM_NODES, NETWORK = 2, "10.79.0"

CONFIGURATION = """
ClusterName=test
SlurmctldHost=control({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Credentials that expire soon: a requeued job waits that long.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{num_nodes}] CPUs=8 RealMemory=2000 Gres=gpu:4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def reason_against() -> str:
    """Why no cluster can be started here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"Slurm is not installed: no {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge "
            "iproute2)"
        )
    return "" if os.geteuid() == 0 else "starting a Slurm cluster needs root"


class Cluster:
    """Up when constructed; `close` it."""

    def __init__(self, directory: Path, patience: Callable[[float], float]) -> None:
        self._directory = directory
        self._patience = patience  # of tests/ranks.py, which this file as a script cannot import
        directory.mkdir(parents=True)
        directory.chmod(0o755)
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        hosts = [
            "127.0.0.1 localhost",
            f"{NETWORK}.254 control",
            *(f"{NETWORK}.{i} n{i}" for i in range(1, NUM_NODES + 1)),
        ]
        (directory / "hosts").write_text("\n".join(hosts) + "\n")
        text = CONFIGURATION.format(directory=directory, network=NETWORK, num_nodes=NUM_NODES)
        (directory / "slurm.conf").write_text(text)
        for number in range(4):  # Slurm counts them and tells tasks their numbers; what they are it does not ask
            os.mknod(directory / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-3]\n")
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used, but slurmd looks for it
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        with (directory / "inside.log").open("w") as log:
            self._outer = subprocess.Popen(
                [
                    "unshare",
                    "--net",
                    "--uts",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    sys.executable,
                    __file__,
                    str(directory),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        end = time.monotonic() + patience(60)
        while not (directory / "ready").exists():
            if self._outer.poll() is not None or time.monotonic() > end:
                logs = [path.read_text() for path in directory.glob("*.log")]
                self.close()
                raise RuntimeError("the Slurm cluster did not come up:\n" + "\n".join(logs))
            time.sleep(0.05)
        self._init = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())

    def command(self, *words: str) -> list[str]:
        """`words` as a command inside the cluster, on its control host."""
        return [
            "nsenter",
            "-t",
            str(self._init),
            "--net",
            "--uts",
            "--mount",
            "--pid",
            f"--wd={Path.cwd()}",
            "--",
            *words,
        ]

    def run(self, *words: str, check: bool = True, environment: dict[str, str] | None = None) -> str:
        """Run a command inside and give what it printed."""
        done = subprocess.run(
            self.command(*words),
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=self._patience(120),
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def close(self) -> None:
        self._outer.send_signal(signal.SIGKILL)  # unshare takes all inside with it
        self._outer.wait()


def inside(directory: Path) -> None:
    """The first process in the namespaces: start the daemons, then reap orphans."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    run("hostname", "control")
    run("mount", "--bind", str(directory / "hosts"), "/etc/hosts")
    run("mount", "-t", "tmpfs", "none", "/run")  # for the names of network namespaces
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "name", "bridge", "type", "bridge")
    run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", "bridge")
    run("ip", "link", "set", "bridge", "up")
    munge = {name: f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "seed", "log")}
    run("munged", f"--socket={directory}/munge.socket", *munge.values())
    subprocess.Popen(["slurmctld", "-D"])
    for number in range(1, NUM_NODES + 1):
        node = f"n{number}"
        run("ip", "netns", "add", node)
        run("ip", "link", "add", "name", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", node)
        run("ip", "link", "set", f"v{number}", "master", "bridge", "up")
        run("ip", "-n", node, "link", "set", "lo", "up")
        run("ip", "-n", node, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        run("ip", "-n", node, "link", "set", "eth0", "up")
        daemon = f"hostname {node} && exec slurmd -D -N {node}"
        subprocess.Popen(["nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "sh", "-c", daemon])
    while True:
        idle = subprocess.run(
            ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"], capture_output=True, text=True, check=False
        )
        if idle.stdout.strip() == str(NUM_NODES):
            break
        time.sleep(0.1)
    (directory / "ready").touch()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


if __name__ == "__main__":
    inside(Path(sys.argv[1]))

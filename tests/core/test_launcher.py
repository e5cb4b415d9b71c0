"""What srun, mpirun, mpiexec and systemd say in the environment of a process."""

from __future__ import annotations

import os

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.launcher import JobStep, Service, job_step, service

SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "prterun-pc1-5@1"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "step"),
    [
        (SRUN, JobStep(3, 4, "71.0")),
        (SRUN | {"SLURM_RESTART_COUNT": "2"}, JobStep(3, 4, "71.0.2")),
        (MPIRUN, JobStep(1, 8, "prterun-pc1-5@1")),
        (HYDRA, JobStep(0, 2, "")),
        (HYDRA | {"PMI_JOBID": "kvs_9"}, JobStep(0, 2, "kvs_9")),
    ],
)
def test_a_place_in_a_job_step_is_read(environment, step):
    assert job_step(environment) == step


def test_mpirun_within_a_slurm_job_counts_before_the_step_of_its_helpers():
    assert job_step(SRUN | MPIRUN) == job_step(MPIRUN)
    assert job_step(SRUN | HYDRA) == job_step(HYDRA)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "71"}, ("SLURM_STEP_NUM_TASKS", "srun")),
        (SRUN | {"SLURM_PROCID": "4"}, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")),
        (SRUN | {"SLURM_PROCID": "-1"}, ("SLURM_PROCID", "'-1'")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "²"}, ("SLURM_STEP_NUM_TASKS",)),
        (HYDRA | {"PMI_SIZE": ""}, ("PMI_SIZE",)),
    ],
)
def test_what_is_missing_or_no_number_is_named(environment, names):
    with pytest.raises(ConfigError) as caught:
        job_step(environment)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("environment", "listens"),
    [
        ({}, Service("", 0.0)),
        ({"WATCHDOG_USEC": "30000000"}, Service("", 0.0)),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, Service("/run/systemd/notify", 0.0)),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000"}, Service("@x", 30.0)),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, Service("@x", 30.0)),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, Service("@x", 0.0)),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "soon"}, Service("@x", 0.0)),
    ],
)
def test_a_service_manager_and_its_watchdog_are_read(environment, listens):
    assert service(environment) == listens

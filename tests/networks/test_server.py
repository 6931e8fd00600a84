"""docs/deploy.md typed as it is printed, on five hosts; then the server fails (make networks).

The tests share the hosts, and the first two a run, and run in this order.
"""

import operator
import time

import pytest

from tests.support.deployment import wait_for
from tests.support.site import (
    RUNS,
    SITE_TIMEOUT,
    blocks,
    for_node,
    restart_always,
    site_unavailable,
)

pytestmark = [
    pytest.mark.networks,
    pytest.mark.skipif(bool(reason := site_unavailable()), reason=reason),
]


def test_a_superlink_down_for_10_s_fails_no_run(site, run):
    site.programs["superlink"].end()
    time.sleep(10)
    site.start_server("superlink")
    run.wait_for_rounds(len(run.rounds) + 2)
    assert run.status == "running"
    assert run.stream_ended
    assert run.program.process.returncode == 1  # only of --stream
    run.wait_for_all()
    assert [record["round"] for record in run.rounds] == list(range(1, len(run.rounds) + 1))


def test_a_superlink_down_for_90_s_fails_the_run_which_can_be_resumed(site, run):
    site.programs["superlink"].end()
    time.sleep(90)
    site.start_server("superlink")
    wait_for(lambda: run.status == "finished:failed", "its failure", SITE_TIMEOUT, pause=2)
    directory = site.server.run(f"echo {run.folder}/*").strip()
    assert directory.startswith(RUNS)
    num_rounds = len(run.rounds)
    site.wait_for_nodes(3)
    # The failed run's process ends only when it has reached the SuperLink again.
    find_process = "ps -e -o args= | grep [f]lwr-serverapp || true"
    wait_for(lambda: not site.server.run(find_process), "its end", SITE_TIMEOUT, pause=1)
    resumed = site.run(num_rounds + 2, f"resume='{directory}'", folder=run.folder)
    assert resumed.wait() == "finished:completed", resumed.program.log
    assert [record["round"] for record in run.rounds] == list(range(1, num_rounds + 3))
    assert max(run.took_part(num_rounds)) == 3


def test_all_devices_take_part_after_an_expired_certificate_is_renewed(site):
    renew = blocks("operating.md", "Adding, replacing, revoking")[0]
    assert "rm -r ~/keys/superlink" in renew
    expire = (
        "from ravan_flwr.launch import credentials; from ravan_flwr.cli import main; import sys; "
        "credentials.SUPERLINK_DAYS = -0.5; main(sys.argv[1:])"
    )
    expired = renew.replace("ravan-flwr keys", f"python -c {expire!r} keys".replace("'", '"'))
    assert expired != renew
    for line in expired.splitlines():
        site.operator.type(line)
    site.restart_server()
    logs = [site.programs[f"node-{number}"] for number in range(3)]
    failed = lambda: all("SSL/TLS handshake error" in node.log for node in logs)  # noqa: E731
    wait_for(failed, "all to give up", SITE_TIMEOUT)
    site.devices[0].run("curl -sf localhost:9094/health")  # still answers 200
    with pytest.raises(RuntimeError, match="TO DO server .*certificate has expired"):
        site.devices[0].run(for_node(0, site.doctor))
    site.programs["node-0"].end()  # a SuperNode that starts now ends at once
    text = restart_always(for_node(0, site.supernode), 5, after="echo status $?;")
    logs[0] = site.programs["node-0"] = site.devices[0].start(text)
    wait_for(lambda: "status 1" in logs[0].log, "it to end", SITE_TIMEOUT)

    num_admissions = lambda: [node.log.count("SuperNode ID") for node in logs]  # noqa: E731
    before = num_admissions()
    for line in renew.splitlines():
        site.operator.type(line)
    site.restart_server()
    # Not `flwr supernode list`, which lists SuperNodes without a connection as online.
    all_readmitted = lambda: all(map(operator.gt, num_admissions(), before))  # noqa: E731
    wait_for(all_readmitted, "all to be admitted again", SITE_TIMEOUT, pause=1)
    for number in (1, 2):  # the two that had not ended by themselves
        log = site.programs[f"check-{number}"].log
        assert "had no connection to server.example.org:8000" in log
    run = site.run(1)
    assert run.wait() == "finished:completed"
    assert run.took_part() == [3]

"""`flowcheck inspect` on recorded captures against their ground truth, bare and wrapped in tunnels."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tunnel_frames
from replay import block_of, chunks
from synthetic_job import trained

from flowcheck import jobfile
from flowcheck.errors import UsageError
from flowcheck.inspect.report import Limits, Report, inspect
from flowcheck.inspect.streams import StreamTable
from flowcheck.inspect.table import WIDTH, table
from mirror.flows import Flows
from mirror.record import PcapRecorder
from mirror.tcp import TcpReassembler

ROOT = Path(__file__).resolve().parent.parent
Line = dict[str, Any]
UNUSABLE = ("overlap",)  # two differing copies: tshark's hash is of the one that it chose
ROCE = (
    "c1_clean_v4_1024", "c2_clean_v4_4096", "c3a_clean_v6ll_1024", "c4b_loss_after_tap_1024",
    "c4c_loss_before_tap_4096", "c5a_reorder_dup_1024", "c6b_psnwrap_loss_1024", "c8a_nccl_ar_4096",
    "c8d_nccl_ar_va0_1024_loss", "c9_rnr_1024", "c10_mixed_ops_1024",
)
FEW = Limits(flows=1 << 10, reorder=8 << 20)


def report_of(path: Path, limits: Limits = FEW, **options: Any) -> tuple[Report, list[Line]]:
    with inspect([path], limits=limits, **options) as report:
        return report, [json.loads(line) for line in report.lines()]


def of(kind: str, found: list[Line]) -> list[Line]:
    return [line for line in found if line["type"] == kind]


def look(path: Path, **options: Any) -> list[Line]:
    return report_of(path, **options)[1]


def write(frames: list[tuple[int, bytes]], path: Path) -> Path:
    recorder = PcapRecorder(path)
    recorder.write(block_of(frames))
    recorder.close()
    return path


@pytest.fixture(scope="module")
def expected(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "captures" / "EXPECTED.json").read_text())


# Streams


def test_every_stream_of_every_capture(shared: Path, expected: dict[str, Any]) -> None:
    compared = 0
    for name, entry in expected.items():
        if any(word in name for word in UNUSABLE):
            continue
        found = look(shared / "captures" / name)
        assert found[0]["packets"] == entry["packets"]
        assert found[0]["truncated"] == entry["truncated"]
        streams = of("stream", found)
        for stream in entry.get("follow", ()):
            for node, source, destination in (("n0", "node0", "node1"), ("n1", "node1", "node0")):
                if f"{node}_missing_markers" in stream:
                    continue
                ends = stream[source], stream[destination]
                ours = [s for s in streams if (s["src"], s["dst"]) == ends]
                if not ours:
                    assert stream[f"{node}_bytes"] == 0, "only a direction without any frame may be missing"
                    continue
                # tshark joins sessions with the same inner addresses: then each is the same transfer.
                for one in ours:
                    assert one["bytes"] == stream[f"{node}_bytes"], (name, ends)
                    assert one["sha256"][:16] == stream[f"{node}_sha256"]
                    compared += 1
    assert compared > 60


def test_a_lost_packet_is_a_hole_and_a_second_copy_a_conflict(shared: Path) -> None:
    tcp = shared / "captures" / "tcp"
    (broken,) = [s for s in of("stream", look(tcp / "tcp_minus_1_packet_smb2_suricata.pcap")) if s["holes"]]
    assert (broken["src"], broken["holes"], broken["conflicts"]) == ("10.3.1.1:445", [[46205, 2896]], [])
    assert broken["bytes"] == 354974 - 2896
    for name, conflict in (("exact_overlap_conflict", [0, 4]), ("partial_overlap", [1, 3])):
        found = of("stream", look(tcp / f"tcp_{name}_suricata.pcap"))
        assert [s["conflicts"] for s in found if s["conflicts"]] == [[conflict]]
    cut = of("stream", look(tcp / "tcp_truncated_snaplen_1MB_zeek.pcap"))
    (long,) = [s for s in cut if s["bytes"]]
    assert long["holes"][:2] == [[30, 1418], [1478, 1418]] and len(long["holes"]) == 691


def test_tenants_with_the_same_addresses_stay_apart(shared: Path) -> None:
    found = of("stream", look(shared / "captures" / "tunnels" / "vxlan_overlapping_vni_http_zeek.pcap"))
    names = {None, "vxlan 127.0.0.1>127.0.0.1#4242", "vxlan 127.0.0.1>127.0.0.1#4711"}
    assert {s["tunnel"] for s in found} == names and len(found) == 6


@pytest.mark.parametrize("name", ["tcp_ooo_1.7MB_suricata", "tcp_highloss_server_view_trex",
                                  "tcp_minus_1_packet_smb2_suricata", "tcp_truncated_snaplen_1MB_zeek"])
def test_little_memory_changes_no_hash(shared: Path, name: str) -> None:
    """Streams are hashed and let go on the way; what came in order is the same, and no copy came late in these."""
    path = shared / "captures" / "tcp" / f"{name}.pcap"
    _, small = report_of(path, Limits(streams=1 << 16, flows=1 << 10, reorder=8 << 20))
    assert of("stream", small) == of("stream", look(path))


@pytest.mark.parametrize("limit", [0, 1 << 14, 1 << 30])
def test_a_second_copy_of_what_was_let_go_is_not_compared(shared: Path, limit: int) -> None:
    """Every packet comes twice, ten frames a block."""
    frames = tunnel_frames.frames_of(shared / "captures" / "tcp" / "tcp_all_packets_duplicated_zeek.pcap")
    tcp, ended = TcpReassembler(Flows(64)), []
    streams = StreamTable(tcp.flows, lambda vantage: None, ended.append, limit=limit)
    for chunk in chunks(frames, 10):
        streams.feed(tcp.feed(block_of(chunk), chunk[-1][0]))
    streams.feed(tcp.flush(frames[-1][0]))
    streams.finish()
    told = {(s.present, s.line()["sha256"][:16]) for s in ended}
    assert told == {(3705, "a833f887de5bbaaf"), (4273, "58e0c8465f5afb1b")}
    assert [s.unchecked > 0 for s in ended] == [limit == 0] * 2
    assert all(s.room <= 4 * limit for s in ended)


# Messages


@pytest.mark.parametrize("case", ROCE)
def test_every_message_of_the_ground_truth(shared: Path, case: str) -> None:
    path = shared / "captures" / "roce" / f"{case}.pcap"
    truth = json.loads(path.with_suffix(".json").read_text())
    found = look(path)
    summary = found[0]
    assert (summary["foreign"], summary["icrc_bad"], summary["truncated"]) == (0, 0, 0)
    ends = {name: end["ip"] for name, end in truth["endpoints"].items()}
    way = {"c2s": (ends["client"], ends["server"]), "s2c": (ends["server"], ends["client"])}
    messages = {(m["src"], m["dst"], m["qp"], m["first_psn"]): m for m in of("message", found)}
    assert len(messages) == len(of("message", found))
    for known in truth["messages"]:
        message = messages.pop((*way[known["dir"]], known["dest_qpn"], known["first_psn"]))
        assert (message["opcode"], message["length"], message["complete"], message["holes"]) == (
            known["op"], known["length"], True, [])
        assert (message["va"], message["rkey"], message["imm"]) == (known["remote_va"], known["rkey"], known["imm"])
        assert known["sha256"] in (None, message["sha256"])
    assert not messages


def test_holes_where_they_are(shared: Path) -> None:
    report, found = report_of(shared / "captures" / "nccl" / "iter_80000.pcapng")
    broken = [m for m in of("message", found) if not m["complete"]]
    broken.sort(key=lambda m: m["first_psn"])
    assert [(m["qp"], m["first_psn"], m["length"], m["holes"]) for m in broken] == [
        (0xC99, 41, 39040, [[21504, 15360], [37888, 1152]]), (0x514, 120, 40960, [[28672, 12288]])]
    assert "2 messages not whole, 28.8 kB of them missing" in table(report)


def test_foreign_packets_and_addresses_in_every_packet(shared: Path) -> None:
    found = look(shared / "captures" / "nccl" / "rdma32.pcapng")
    assert found[0]["foreign"] == 7
    own = [m for m in of("message", found) if m["qp"] == 0x38B]
    assert [m["length"] for m in own] == [7232, *[1024] * 16, 0]
    assert (own[0]["imm"], own[-1]["imm"], own[-1]["opcode"]) == ("0x401c0000", "0x00400000", "RDMA_WRITE_WITH_IMM")


def test_messages_that_find_no_room_are_said(shared: Path) -> None:
    path = shared / "captures" / "roce" / "c1_clean_v4_1024.pcap"
    report, found = report_of(path, Limits(messages=4096, flows=1 << 10, reorder=8 << 20))
    assert "found no room" in report.notes[0]
    kept = {(m["qp"], m["first_psn"]): m for m in of("message", look(path))}
    assert any(message["holes"] for message in of("message", found))
    for message in of("message", found):
        assert message["holes"] or message == kept[message["qp"], message["first_psn"]]


# Gloo's collectives


@pytest.mark.parametrize(("name", "senders"), [("nano", (1, 2)), ("scalar3", (1, 2))])
def test_final_values_are_the_gradients(shared: Path, name: str, senders: tuple[int, int]) -> None:
    path = shared / "captures" / "gloo" / f"{name}.pcap"
    truth = json.loads(path.with_suffix(".json").read_text())
    found = of("collective", look(path, dtype="fp32"))
    reduced = [line for line in found if line["kind"] == "allreduce"]
    tags = sorted({line["ordinal"] for line in reduced})
    assert len(tags) == 6 and {line["library"] for line in found} == {"gloo"}
    for tag, gradients in zip(tags, _buckets(truth), strict=True):
        mine = [line for line in reduced if line["ordinal"] == tag]
        assert tuple(line["sender_rank"] for line in mine) == senders
        covered = np.zeros(len(gradients), bool)
        for line in mine:
            assert (line["bytes"], line["dtype"]) == (len(gradients), "float32")
            assert line["elements"] == len(gradients) // 4 and line["algorithm"] == "ring"
            for first, last, digest in line["final"]:
                assert digest == hashlib.sha256(gradients[first:last]).hexdigest()
                covered[first:last] = True
        assert covered.all()


def _buckets(truth: Any) -> list[bytes]:
    """The bucket of every iteration: the first in the order of the parameters, then as DDP rebuilt it."""
    rebuilt = [int(index) for index in truth["ddp_logging"]["rebuilt_per_bucket_param_indices"].split()]
    result = []
    for number, gradients in enumerate(truth["grad_after_allreduce"]):
        values = list(gradients.values())
        order = rebuilt if number else range(len(values))
        result.append(np.array([float.fromhex(v) for i in order for v in values[i]], np.float32).tobytes())
    return result


def test_every_kind_of_collective(shared: Path) -> None:
    found = of("collective", look(shared / "captures" / "gloo" / "collectives.pcap"))
    kinds = {line["kind"] for line in found}
    assert kinds == {"allgather", "allreduce", "alltoall", "barrier", "broadcast", "gather", "reduce", "scatter",
                     "sendrecv"}
    sizes = {line["ordinal"]: line["bytes"] for line in found if line["kind"] == "allreduce"}
    assert sizes == {3: 100, 11: 4, 13: 8, 14: 400, 15: 3, 17: 120, 18: 120, 19: 20000, 20: 20004, 21: 20008, 22: 20012}
    for tag, size in sizes.items():
        # All ports were mirrored: every byte is final on some link, and all links say the same of it.
        final = sorted(tuple(part) for line in found if line["ordinal"] == tag for part in line["final"])
        at = 0
        for first, last, _ in final:
            assert first <= at
            at = max(at, last)
        assert at == size
    assert all(line["elements"] is line["dtype"] is None for line in found)
    gathered = [line for line in found if line["kind"] == "allgather" and line["bytes"] is not None]
    assert gathered and all(line["bytes"] % 5 == 0 for line in gathered)


def test_an_element_type_that_does_not_fit_is_not_claimed(shared: Path) -> None:
    found = of("collective", look(shared / "captures" / "gloo" / "collectives.pcap", dtype="fp32"))
    known = {line["ordinal"]: line["elements"] for line in found if line["kind"] == "allreduce"}
    assert known[15] is None and known[3] == 25 and known[19] == 5000
    with pytest.raises(UsageError, match="--dtype float: one of fp32"):
        look(shared / "captures" / "gloo" / "nano.pcap", dtype="float")


def test_a_hole_in_a_final_value_splits_its_range(shared: Path, tmp_path: Path) -> None:
    """A frame with final values of the largest all-reduce is dropped: all else of it stays proven."""
    path = shared / "captures" / "gloo" / "collectives.pcap"
    whole = {(line["ordinal"], line["sender_rank"]): line["final"] for line in of("collective", look(path))}
    frames = tunnel_frames.frames_of(path)
    sizes = [len(data) for _, data in frames]
    dropped = {frames[sizes.index(max(sizes))][1]}
    report, found = report_of(write([f for f in frames if f[1] not in dropped], tmp_path / "cut.pcap"))
    ranges = 0
    for line in of("collective", found):
        before = whole.get((line["ordinal"], line["sender_rank"]))
        assert before is not None
        for first, last, _ in line["final"]:
            assert any(a <= first and last <= b for a, b, _ in before)
        ranges += line["final"] != before
    assert ranges > 0 and "were never captured" in table(report)


# Tunnels


WRAPPINGS = ("vlan 0", "erspan2", "erspan3", "vxlan")
WRAPPED = ("gloo/nano.pcap", "roce/c8d_nccl_ar_va0_1024_loss.pcap", "nccl/allreduce+p2p.pcapng",
           "tcp/tcp_minus_1_packet_smb2_suricata.pcap")


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_captures_give_the_same(shared: Path, tmp_path: Path, name: str) -> None:
    path = shared / "captures" / name
    frames = tunnel_frames.frames_of(path)
    bare = look(path)
    for wrapping in WRAPPINGS:
        wrap: Callable[[bytes], bytes] = tunnel_frames.WRAPPINGS[wrapping]
        found = look(write([(ts, wrap(data)) for ts, data in frames], tmp_path / f"{wrapping}.pcap"))
        kind = wrapping.split()[0]
        assert found[0]["encapsulations"] == {kind: len(frames)}
        assert found[0]["packets"] == bare[0]["packets"] and found[0]["truncated"] == 0
        for line in of("stream", found):
            assert (line["tunnel"] is None) == (kind == "vlan") and kind in (line["tunnel"] or "vlan")
            line["tunnel"] = None
        assert found[1:] == bare[1:], wrapping


# The table and the command


def test_the_table_fits_and_tells(shared: Path) -> None:
    for name, words in (
        ("gloo/nano.pcap", ("gloo", "tcpstore", "allreduce", "ring", "6 x 8 B", "at most 6", "nothing is missing")),
        ("tcp/tcp_one_direction_only_suricata.pcap", ("1 connection seen in one direction only",)),
        ("tcp/tcp_truncated_snaplen_1MB_zeek.pcap", ("691 frames cut short by the capture's snapshot length", "-s 0")),
        ("tcp/tcp_ooo_1.7MB_suricata.pcap", ("2a01:e35:1394:5bd0:da50:e6ff:fe3c:3250", "1.7 MB")),
        ("tunnels/erspan2_inner_tcp_pair_suricata5437-02.pcap", ("erspan2 (", "TUNNEL")),
        ("roce/c4b_loss_after_tap_1024.pcap", ("RoCE packets",)),
        ("nccl/rdma32.pcapng", ("port 4791: left out, of no reliable connection: 7 others",)),
    ):
        text = table(report_of(shared / "captures" / name)[0])
        assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH
        for word in words:
            assert word in text, (name, word, text)


def test_ranks_that_are_not_known_are_said(shared: Path, tmp_path: Path) -> None:
    frames = tunnel_frames.frames_of(shared / "captures" / "gloo" / "nano.pcap")
    alone = [f for f in frames if (29500).to_bytes(2, "big") not in (f[1][34:36], f[1][36:38])]
    report, found = report_of(write(alone, tmp_path / "a.pcap"))
    assert not of("collective", found)
    assert "6 streams of unknown ranks" in table(report) and "--job FILE" in table(report)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "from flowcheck.cli import Commands\nfrom flowcheck.inspect.command import inspect_command\n"
        "Commands(commands={'inspect': inspect_command}).main()"
    )
    return subprocess.run([sys.executable, "-c", program, "inspect", *arguments], capture_output=True, text=True,
                          timeout=240, cwd=ROOT, check=False)  # fmt: skip


def test_the_command(shared: Path, tmp_path: Path) -> None:
    path = str(shared / "captures" / "tcp" / "tcp_partial_overlap_suricata.pcap")
    done = command("--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[0] == {"type": "summary", "packets": 7, "bytes": 421, "truncated": 0, "foreign": 0, "icrc_bad": 0,
                        "encapsulations": {"vlan": 7}}
    assert list(found[1]) == ["type", "transport", "src", "dst", "tunnel", "bytes", "sha256", "holes", "conflicts"]
    (tmp_path / "text.pcap").write_text("no capture")
    for bad, why in ((tmp_path / "text.pcap", "is no capture file"), (tmp_path / "none.pcap", "No such file")):
        done = command(str(bad))
        assert done.returncode == 2 and done.stdout == ""
        assert str(bad) in done.stderr and why in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_frame_is_dissected(shared: Path) -> None:
    path = str(shared / "captures" / "nccl" / "rdma32.pcapng")
    frames = tunnel_frames.frames_of(Path(path))
    port = (4791).to_bytes(2, "big")
    number = next(i for i, (_, data) in enumerate(frames, 1) if data[56:58] == port and data[62] == 11)
    done = command("--frame", str(number), path)
    assert done.returncode == 0, done.stderr
    assert f"frame {number}: " in done.stdout and "BTH" in done.stdout and "IPv6" in done.stdout
    done = command("--frame", "100000", path)
    assert done.returncode == 2 and f"there are {len(frames)} frames" in done.stderr


def test_a_job_file_names_ranks_and_types(tmp_path: Path) -> None:
    """The rendezvous of this job is not in the capture."""
    job = trained(3, rebuilt_at_attach=True)
    description = job.description
    tensors = {key: (spec, np.zeros(spec.nbytes, np.uint8)) for key, spec in description.tensors()}
    jobfile.write(tmp_path / "job.safetensors", description, tensors)
    recorder = PcapRecorder(tmp_path / "a.pcap")
    recorder.write(job.wire.block(job.wire.frames))
    recorder.close()
    assert not of("collective", look(tmp_path / "a.pcap"))
    report, found = report_of(tmp_path / "a.pcap", job=tmp_path / "job.safetensors")
    reduced = [line for line in of("collective", found) if line["kind"] == "allreduce"]
    assert len({line["ordinal"] for line in reduced}) == 6
    assert all((line["dtype"], line["elements"]) == ("float32", line["bytes"] // 4) for line in reduced)
    assert {line["bytes"] for line in reduced} == {320, 160}
    assert "6 all-reduces, 2 a step by the job file" in table(report)

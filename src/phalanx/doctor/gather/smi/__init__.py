"""nvidia-smi's text, read without guessing: each parser returns facts or raises `ParseError` with a reason.

NVIDIA does not promise that this text stays as it is, so NVML is asked first.
"""

from phalanx.doctor.gather.smi.nvlink import Listed, parse_link_errors, parse_links, parse_listing
from phalanx.doctor.gather.smi.query import parse_processes, parse_query
from phalanx.doctor.gather.smi.read import read_smi
from phalanx.doctor.gather.smi.report import parse_report
from phalanx.doctor.gather.smi.text import ParseError
from phalanx.doctor.gather.smi.topology import Topology, parse_peers, parse_topology

__all__ = [
    "Listed",
    "ParseError",
    "Topology",
    "parse_link_errors",
    "parse_links",
    "parse_listing",
    "parse_peers",
    "parse_processes",
    "parse_query",
    "parse_report",
    "parse_topology",
    "read_smi",
]

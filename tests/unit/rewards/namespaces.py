"""Whether this machine permits namespaces, by a program that is not ours."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

_ASKED = ["--mount", "--pid", "--net", "--fork", *([] if os.geteuid() == 0 else ["--user"])]


def _permitted() -> bool:
    program = shutil.which("unshare")
    if program is None:
        return False
    done = subprocess.run([program, *_ASKED, "true"], capture_output=True, timeout=60)
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(not _permitted(), reason="namespaces are not permitted here")

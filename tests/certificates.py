"""A certification authority with certificates, made by openssl for one test."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """`ca` is the file with its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.ca, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        self._new("-x509", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca)

    def _new(self, *arguments: str | Path) -> None:
        command = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key, for a server at 127.0.0.1 or a client."""
        request, cert, key = (self._folder / f"{name}.{suffix}" for suffix in ("csr", "pem", "key"))
        self._new("-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions = self._folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ["openssl", "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"]
        subprocess.run([*signed, "-days", "2", "-extfile", extensions, "-out", cert], check=True, capture_output=True)
        return cert, key

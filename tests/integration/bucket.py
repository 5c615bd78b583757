"""An S3 server for tests."""

import os
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from sluice.process import free_port


class Bucket:
    """An S3 server with a bucket that may go away for a while."""

    def __init__(self) -> None:
        # One of its own: what moto holds is there for the whole process, whatever server is asked.
        self.name = f"artifacts-{os.urandom(4).hex()}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "CONTROL_PLANE__ARTIFACT_STORE_URL": f"s3://{self.name}/some/prefix",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        self.start()
        self.client.create_bucket(Bucket=self.name)

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def keys(self) -> set[str]:
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {item["Key"] for item in listed}

    def fill(self, prefix: str, directory: Path) -> None:
        for path in directory.iterdir():
            self.client.put_object(
                Bucket=self.name, Key=f"{prefix}/{path.name}", Body=path.read_bytes()
            )

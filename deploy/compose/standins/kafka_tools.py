#!/usr/bin/env python
"""In place of Kafka's two scripts that docker-compose.yml calls, against the mock broker.

That one has no admin API and makes its topic by itself; so the broker's answer about its topics is
what is looked at.
"""

import argparse
import sys

from confluent_kafka.admin import AdminClient

_TIMEOUT_S = 5.0


def main() -> None:
    """Fail unless the broker answers and has the topic, if one is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-server", required=True)
    parser.add_argument("--topic")
    parser.add_argument("--partitions", type=int)
    arguments, _ = parser.parse_known_args()
    client = AdminClient({"bootstrap.servers": arguments.bootstrap_server})
    topics = client.list_topics(timeout=_TIMEOUT_S).topics
    if arguments.topic is None:
        return
    if arguments.topic not in topics:
        sys.exit(f"the broker has no topic {arguments.topic}, only {sorted(topics)}")
    found = len(topics[arguments.topic].partitions)
    if found != arguments.partitions:
        sys.exit(f"{arguments.topic} has {found} partitions, not {arguments.partitions}")


if __name__ == "__main__":
    main()

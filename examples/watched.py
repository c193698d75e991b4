"""A node that is watched round by round and stops when it is good enough."""

import swarmnode as sn


def watch(status):
    print(status.progress.round, status.reward.own, status.network.peers)
    if (status.reward.own or 0) > 0.9:
        node.stop()


node = sn.Node("rev", rounds=200, on_round=watch, log=False)

if __name__ == "__main__":
    print(node.run())

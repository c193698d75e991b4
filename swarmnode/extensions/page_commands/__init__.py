"""Commands that ask the page of the node that runs here: pause, resume, finish, stop, and who it knows."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {
        "pause": "swarmnode.extensions.page_commands.control:pause",
        "resume": "swarmnode.extensions.page_commands.control:resume",
        "finish": "swarmnode.extensions.page_commands.control:finish",
        "stop": "swarmnode.extensions.page_commands.control:stop",
        "peers": "swarmnode.extensions.page_commands.peers:peers",
    },
}

"""Lets people and programs ask the policy: OpenAI's endpoints, and a chat in the terminal."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "caller": {"people": "swarmnode.extensions.serve.answering_socket:open_service"},
    "command": {
        "serve": "swarmnode.extensions.serve.serve_command:serve",
        "chat": "swarmnode.extensions.serve.chat_command:chat",
    },
}

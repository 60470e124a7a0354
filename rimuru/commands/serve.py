"""rimuru serve: an OpenAI-compatible address for one model."""

from __future__ import annotations

import argparse

from rimuru.base.errors import BadInputError
from rimuru.base.extras import install_command
from rimuru.base.units import parse_bytes
from rimuru.commands.common import note, open_llm


def serve(args: argparse.Namespace) -> int:
    """Load the model, then answer until a signal ends it: the first drains, the second stops."""
    try:
        from rimuru.server.run import serve as serve_model
        from rimuru.server.settings import ServerSettings, read_api_keys
    except ImportError as error:
        missing = error.name or "one could not be loaded"
        raise BadInputError(f"serving needs more packages ({missing}): {install_command('server')}") from None
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=(*(args.api_key or ()), *read_api_keys(args.api_key_file or ())),
        admin_keys=read_api_keys(args.admin_key_file or ()),
        cors_origins=tuple(args.cors_origin or ()),
        allowed_hosts=tuple(args.allowed_host or ()),
        model_name=args.model_name,
        max_waiting=args.max_waiting,
        max_body_bytes=parse_bytes(args.max_body),
        request_timeout_s=args.request_timeout,
        queue_timeout_s=args.queue_timeout,
        max_priority=args.max_priority,
    )
    more = {} if args.max_sequences is None else {"max_sequences": args.max_sequences}
    with open_llm(args, **more) as llm:
        serve_model(llm.loaded, settings, lambda url: note(f"ready: {url}/v1 (dashboard: {url}/)"))
    return 0

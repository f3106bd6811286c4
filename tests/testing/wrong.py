"""Which clause each wrong backend breaks, and a test class for each; not collected by itself."""

from __future__ import annotations

import importlib

from statelink_conformance import BackendTests

BROKEN: dict[str, tuple[str, str]] = {
    "Early": ("test_bytes_are_visible_before_a_move_is_done", "reported done before their bytes were there"),
    "ForgetsOffset": ("test_blocks_arrive_whatever_their_size", "right bytes at a wrong place"),
    "Sends": ("test_bytes_are_visible_before_a_move_is_done", "reported done before their bytes were there"),
    "ReturnsNothing": ("test_every_alignment_arrives", "`submit` returned None, and not a `Transfer`"),
    "RaisesInDiagnosis": ("test_its_optional_protocols_answer", "`diagnose` raised RuntimeError: boom"),
    "NeedsAnObject": ("test_its_optional_protocols_answer", "`transports` is no class method"),
    "DropsLast": ("test_every_alignment_arrives", "bytes of the target are not what they should be"),
    "TooFar": ("test_blocks_arrive_whatever_their_size", "bytes of the target are not what they should be"),
    "GrantsAll": ("test_memory_that_was_not_granted_is_refused", "it was reported done"),
    "AnyRoom": ("test_a_room_that_was_not_granted_is_refused", "it was reported done"),
    "KeepsGrants": ("test_a_revoke_stops_what_is_under_way", "bytes were written that should not"),
    "ReplacesGrants": ("test_grants_of_one_room_add_up", "what several calls had granted was refused"),
    "RevokesLast": ("test_grants_of_one_room_add_up", "it was reported done"),
    "Swallows": ("test_a_move_fails_when_its_peer_dies", "and none failed within"),
    "Silent": ("test_a_move_fails_when_its_peer_dies", "failed without a reason"),
    "Hangs": ("test_a_move_fails_when_its_peer_dies", "a transfer did not end within"),
    "Unsettled": ("test_what_is_settled_has_stopped[a disconnect]", "bytes landed after a disconnect, and after"),
    "SettledByDisconnect": (
        "test_what_is_settled_has_stopped[a disconnect]",
        "bytes landed after a disconnect, and after their transfer was called settled",
    ),
    "SettledByTimeout": (
        "test_what_is_settled_has_stopped[a stopped peer]",
        "bytes landed after a stopped peer, and after their transfer was called settled",
    ),
    "Late": (
        "test_nothing_lands_once_its_mover_has_ended[running]",
        "bytes landed more than 1 s after the process that moved them had ended",
    ),
    "LateWhenStopped": (
        "test_nothing_lands_once_its_mover_has_ended[stopped]",
        "bytes landed more than 1 s after the process that moved them had ended",
    ),
    "OneRoom": ("test_a_batch_of_several_rooms", "a batch needs its room"),
    "LeaksThreads": ("test_connecting_often_leaves_nothing_behind", "threads more after"),
    "LeaksFiles": ("test_opening_often_leaves_nothing_behind", "descriptors more after 3 times: 6 of "),
    "LeaksMemory": ("test_connecting_often_leaves_nothing_behind", "MiB more after"),
    "TakesGarbage": ("test_a_damaged_descriptor_is_refused", "was accepted"),
    "Crashes": ("test_a_damaged_descriptor_is_refused", "AssertionError"),
    "Unchecked": ("test_a_block_outside_registered_memory_is_refused", "it was reported done"),
    "ClosesOnce": ("test_a_backend_can_be_closed_twice", "closed already"),
    "LeaksShared": ("test_opening_often_leaves_nothing_behind", "files more in /dev/shm after 3 times"),
    "TakesAnyKind": ("test_memory_of_an_undeclared_kind_is_refused", "memory of kind 'granite:0' was not refused"),
    "HidesFence": ("test_its_fence_is_implemented", "declares no Fence.OWNER for the target, and it has"),
    "ForgetsLine": ("test_either_side_connects_first", "has no attribute"),
    "EndsPolled": ("test_a_transfer_ends_without_a_poll", "was not set within"),
    "OutcomeIsTrue": ("test_rooms_follow_each_other", "`Transfer.outcome` is True, and not an `Outcome`"),
    "DescribesAsText": ("test_a_descriptor_is_bytes_and_bounded", "`descriptor` returned '"),
    "NamesNoType": ("test_its_state_types_exist", "no state type named 'kvv'"),
    "AsyncWaits": ("test_submit_does_not_wait_for_its_peer", "did not return within 8 s of a stopped peer"),
    "LargestFirst": (
        "test_large_batches_do_not_starve_a_small_one",
        "large batches that came after a small one to the same peer had ended before it",
    ),
    "TellsEarly": ("test_the_target_is_told_when_its_bytes_have_landed", "called after half of the bytes"),
    "TellsLate": ("test_the_target_is_told_when_its_bytes_have_landed", "called for a grant that was revoked"),
    "OneAtATime": ("test_a_stopped_peer_holds_nobody_else", "a move to a second peer did not end within 8 s"),
    "KeepsPayload": ("test_moving_often_leaves_no_memory_behind", "MiB more after 300 times"),
    "KeepsTransfers": ("test_moving_often_leaves_no_objects_behind", "objects of type Transfer more are alive"),
    "KeepsRooms": ("test_moving_often_leaves_no_objects_behind", "the target keeps"),
    "TooFarByPages": (
        "test_whole_pages_arrive_and_nothing_beyond",
        "bytes of the target are not what they should be",
    ),
    "GrantsByRegion": ("test_a_grant_may_span_adjacent_regions", "was refused"),
    "TransportIsNumber": (
        "test_it_tells_the_transport_of_a_peer",
        "after a move, at the prefill side: `transport` returned 42, and not a str",
    ),
    "TransportIsOther": (
        "test_it_tells_the_transport_of_a_peer",
        "after a connect, at the prefill side: `transport` returned 'socket+pigeon', and `transports` says ",
    ),
    "TransportRaises": (
        "test_it_tells_the_transport_of_a_peer",
        "after a connect, at the prefill side: `transport` raised RuntimeError: boom",
    ),
    "NeedsAnAnswer": ("test_a_peer_that_never_connects_is_forgotten", "this peer has never taken a batch"),
    "RefusesStrangers": ("test_disconnecting_twice_or_from_nobody_is_ignored", "KeyError: 'nobody'"),
    "SharesStaging": (
        "test_several_peers_are_served_at_once",
        "bytes of the target are not what they should be",
    ),
    "SwallowsFirst": ("test_a_move_to_a_dead_peer_fails[before]", "move 1 to a dead peer was reported done"),
    "DoneOnceLost": ("test_a_move_to_a_dead_peer_fails[before]", "move 2 to a dead peer was reported done"),
    "LossIsAnAnswer": (
        "test_a_move_is_done_only_if_its_peer_has_taken_part",
        "a move was reported done, and its peer was killed with 7992 bytes missing",
    ),
    "DropsLastOfLarge": (
        "test_a_quarter_of_a_gibibyte_arrives",
        "bytes of the target are not what they should be, the first at 67108863",
    ),
    "ServesOn": (
        "test_closing_leaves_nothing_to_a_peer_that_stays",
        "a move to a backend that was closed was reported done",
    ),
    "SettlesWhenPolled": (
        "test_what_is_settled_has_stopped[a disconnect]",
        "bytes landed after a disconnect, and after their transfer was called settled",
    ),
    "SettlesOneOfSeveral": (
        "test_what_is_settled_has_stopped[a disconnect]",
        "bytes landed after a disconnect, and after their transfer was called settled",
    ),
    "SettledByClose": (
        "test_what_is_settled_has_stopped[a close]",
        "bytes landed after a close, and after their transfer was called settled",
    ),
    "SilentWhenQueued": (
        "test_what_is_settled_has_stopped[a disconnect]",
        "a transfer failed without a reason",
    ),
    "LosesOneIn200": (
        "test_moving_often_leaves_no_objects_behind",
        "bytes of the target of batch 50 in a row are not what they should be",
    ),
    "LeaksWhenConnectedAgain": ("test_connecting_again_leaves_nothing_behind", "threads more after 15 times"),
    "KeepsOldTable": ("test_connecting_again_replaces_the_region_table", "it was reported done"),
    "SkipsZeros": ("test_zeros_arrive", "nothing was written where a block has to be"),
    "ClosesWhenDone": (
        "test_close_does_not_wait_for_a_stopped_peer[mover]",
        "`close` of the mover did not return within 8 s of a stopped process",
    ),
    "ConnectsWhenClosed": (
        "test_a_closed_backend_refuses",
        "a connect of a backend that was closed was not refused",
    ),
    "ForgetsPeers": ("test_a_peer_can_be_forgotten_and_connected_again", "this peer was here before"),
}
"""Class of the backend, to the clause that it breaks, and to a part of what the kit says of it."""

_wrong = importlib.import_module("statelink_wrong")
for _name in BROKEN:
    _attributes = {
        "backend": getattr(_wrong, _name).name,
        "options": {"connect_timeout": 2.0},  # well within the patience
        "patience": 4.0,
        "connects": 30,
    }
    globals()[f"Test{_name}"] = type(f"Test{_name}", (BackendTests,), _attributes)

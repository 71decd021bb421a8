"""What the application promises, section by section, and the tests that hold it to it.

Each row: section of the product specification, mark (M must, S should), the promise in short, tests as "file:function"
(tests/ui unless a folder is named). An indented line continues the row above. The test below fails when a named test is not there.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

TABLE = """
1.2  M  nothing typed or said is lost | chat:stop_keeps_what_was_shown_and_the_next_turn_works terminal:a_kill_loses_no_shown_text_of_a_second_ago
    kills:killed_at_three_moments mended:enter_before_the_start_is_over_waits_for_its_conversation
    typing:what_is_typed_behind_an_enter_stays typing:a_message_that_could_not_be_stored_comes_back_before_what_was_typed_since
1.4  M  every wait shows progress and can be cancelled |
    chat:writing_while_a_build_loads chat:stop_in_prefill_gives_the_prompt_back_and_editing_it_makes_a_sibling
1.5  M  everything by keyboard and in the palette | tools:every_action_of_the_table_is_bound_listed_and_exists actions:actions
    actions:the_palette_lists_every_action_and_nothing_else
1.1  M  the figures that are shown are the engine's | figures:a_resumed_turn_is_told_alike_everywhere
1.7  M  no network | test_network:no_socket_connects_or_listens test_network:a_program_that_a_test_starts_has_none_either
1.6  M  stdout of scripted mode is data only | headless:text_writes_the_answer_and_nothing_else
2    M  header, message headers, receipts, status and key line | snapshots:chat status:receipts
2    M  no box border to the right of running text, rules of code blocks | render:copy_undoes_wrapping_and_decoration snapshots:chat
2    M  sidebar from 120 columns, by F3 from 90 | chat:the_sidebar_follows_the_width
2    M  width classes and the page for too small terminals | snapshots:picker_and_too_small chat:a_tiny_terminal_shows_one_page_and_recovers
    chat:a_tiny_terminal_names_its_keys_and_they_stop chat:a_tiny_terminal_is_left_with_the_second_press_while_an_answer_runs
2    M  the line at the top stays on resize | chat:the_line_at_the_top_stays_when_the_width_changes
2.1  M  phase, context, cache, draft, engram, queue | status:phases_follow_the_events status:context_warns_in_words status:tables_and_queue
2.1  M  draft depth and acceptance over the last 128 | status:drafting_counts_the_last_proposals
2.1  S  turn details with peak memory | first_steps:details_name_the_memory
    tools:commands_act_and_unknown_ones_keep_the_text engram:stats_page_has_the_tables
2.2  M  conversation list with filter, keys and preview | chat:the_list_opens_conversations snapshots:picker_and_too_small
2.2  M  build menu with verdicts | tools:a_tight_build_asks_with_the_whole_sum tools:a_failed_switch_leaves_the_old_build_answering
2.2  M  settings with origins, applied at once | tools:settings_show_origins_and_write_the_file
2.2  M  help from the active bindings, palette | tools:every_action_of_the_table_is_bound_listed_and_exists
2.2  M  search in the conversation | tools:find_walks_through_the_hits
2.2  M  search everywhere, also on other branches | tools:search_everywhere_opens_the_message_on_its_branch
    tools:the_filter_of_the_list_opens_the_place_in_the_text
2.2  M  export page, files are never overwritten | tools:export_page_writes_a_file tools:file_names_are_never_overwritten
2.2  S  import from the palette | first_steps:an_export_comes_back_by_the_palette
2.2  M  loading page: read, search, write meanwhile | chat:writing_while_a_build_loads
3    M  Enter sends, ctrl+J and reported variants make a new line | chat:enter_sends_once_and_refuses_nothing terminal:a_chat_in_a_terminal
3    M  Esc stops, never quits; ctrl+C copies, stops, clears, quits | chat:ctrl_c_stops_clears_and_quits
3    M  regenerate, fold, editor, find | tools:regenerate_makes_siblings_with_their_own_seed tools:the_editor_gets_and_gives_the_text
3    M  prompt history keeps what was being written | chat:history_walks_and_keeps_what_was_being_written
3    M  one code block at once, more by digit | first_steps:a_digit_chooses
3    M  transcript keys act on the selected message | tools:copy_gives_sources_exactly tools:edit_makes_a_branch_and_both_stay_reachable
3    S  slash commands with completion, // sends a slash | tools:commands_act_and_unknown_ones_keep_the_text
3    M  user keymap, clashes reported with both ids | tools:the_user_keymap_moves_keys_and_reports_clashes
4.1  M  the user's message is committed before engine work |
    store/tree:a_user_message_is_committed_before_add_returns chat:failures_are_one_sentence_and_the_text_stays
4.1  M  streamed text is drawn as the whole text would be | render:chunks_do_not_change_the_blocks bench/ui:a_short_run_writes_a_receipt
4.1  M  following, leaving the end, badge | chat:scrolling_up_stops_following_and_end_resumes
4.1  M  queue of five, stored, recalled, removed |
    chat:messages_queue_while_a_turn_runs chat:del_removes_the_last_queued_message chat:the_queue_waits_after_a_stop
4.1  M  thinking folded with a live counter, kept when stopped | chat:thinking_is_folded_while_it_runs_and_kept_when_stopped
4.1  M  control characters are shown as symbols |
    chat:escape_sequences_of_any_text_never_reach_the_screen terminal:no_control_byte_of_any_text_reaches_the_terminal
    output_safety:commands output_safety:scripted_mode_on_a_terminal output_safety:errors_and_notices output_safety:the_line_mode
    output_safety:a_megabyte output_safety:every_input_line_shows_symbols_and_keeps_what_was_pasted
4.1  S  links, images as text | render:links_carry_only_web_addresses
4.1  S  formulas as Unicode | render:formulas_become_unicode_and_prices_stay
4.1  M  tables wrap, then scroll; code wraps only on demand |
    render:wide_tables_are_wrapped_then_scrolled render:lines_fit_and_hold_no_control_characters
4.2  M  stop within a round or chunk; what was shown is kept | chat:stop_keeps_what_was_shown_and_the_next_turn_works states:cancelled_turns
4.2  M  no token: the prompt returns for editing | chat:stop_in_prefill_gives_the_prompt_back_and_editing_it_makes_a_sibling
4.2  M  a retry or a continuation that stores nothing leaves screen and leaf as they were |
    retries:what_was_on_the_screen_is_there_again retries:a_question_without_an_answer_keeps_its_hint
    retries:a_retry_that_fails_later_is_what_the_next_message_goes_on_from retries:in_lines_the_earlier_answer_stays
4.2  M  continue from the kept text | tools:continue_goes_on_from_the_kept_text
4.3  M  a tree: edit and regenerate are siblings, nothing is overwritten |
    tools:edit_makes_a_branch_and_both_stay_reachable store/tree:edit_and_retry_are_siblings
4.3  M  a fixed seed moves by the sibling index | tools:regenerate_makes_siblings_with_their_own_seed
4.3  M  sibling marks, switching, last leaf remembered |
    tools:edit_makes_a_branch_and_both_stay_reachable store/tree:a_branch_is_entered_at_the_leaf_looked_at_last
4.3  S  save only; fork into a new conversation | tools:save_only_and_fork
4.4  M  opening shows text at once, state comes in the background, reasons in words |
    states:an_opened_conversation_is_made_ready store/prompt_cache:reasons
4.4  M  cost of rewriting the start of the prompt | tools:settings_show_origins_and_write_the_file tools:the_cost_of_a_rewrite_is_said
4.4  M  -c, --resume, resume hint on exit |
    terminal:a_chat_in_a_terminal chat:resume_shows_the_conversation_and_goes_on test_screen_start:which_conversation
4.4  S  draft, scroll, folds and queue return | tools:view_and_draft_return
4.5  M  switching: any failure returns to the previous build | tools:a_failed_switch_leaves_the_old_build_answering switch:a_build_that_does_not_fit
4.5  M  states of other builds are kept; ids are the target's | switch:to_another_family_and_back
4.6  M  first steps without a build | first_steps:the_page_from_the_build_menu first_steps:without_a_back_end_it_is_the_first_page
    first_steps:the_machine_and_what_fits_it
4.6  M  usable without a build or back end |
    test_screen_start:without_a_back_end_the_screen_opens_for_reading test_commands:commands_work_without_a_back_end
4.6  M  the embedded model answers at once and says what it is | chat:first_start_says_what_answers_and_a_turn_runs
4.7  M  projection, verdicts, whole sum, remedies | tools:a_tight_build_asks_with_the_whole_sum
4.7  M  out of memory and a lost GPU: text kept, advice, no traceback |
    device:out_of_memory_keeps_the_text_and_begins_a_new_lane device:a_lost_device_answers_nothing_more device:on_the_screen
4.7  M  loop stop, and its setting | engine/answer:loop_stop_can_be_switched_off test_setting_effects:sampling_settings_reach_the_engine
4.7  M  context full: choices, never silent truncation |
    tools:a_full_context_offers_what_can_be_done headless_failures:context_full_before_any_engine_work
4.8  M  checkpoints, interrupted answers | chat:an_interrupted_answer_is_announced signals:kill_9_loses_less_than_a_second
4.8  M  SIGTERM and SIGHUP restore the terminal | terminal:a_signal_restores_the_terminal_and_keeps_the_text
4.8  M  a fault ends in one paragraph | terminal:a_fault_ends_in_one_paragraph_and_a_clean_terminal
4.8  M  two processes: read-only, take over | terminal:a_second_process_reads_only tools:two_processes_second_is_read_only
    second_window:a_second_window_shows_what_the_first_adds
4.8  M  one large build per machine | headless_turns:only_one_process_holds_a_large_build
4.8  M  database locked, disk full, read-only folder |
    store_trouble:a_full_disk_on_the_screen store_trouble:a_locked_database_on_the_screen store_trouble:a_full_disk_in_scripted_mode
    tools:a_store_that_refuses_leads_to_memory_and_back test_screen_start:a_database_that_cannot_be_opened_is_said_on_the_screen
4.9  M  pastes are whole and never send | chat:paste_is_one_message_bracketed_or_not terminal:a_chat_in_a_terminal
4.9  M  big pastes are chips, sent whole, with a token count |
    chat:big_pastes_become_chips_and_are_sent_whole tools:files_become_chips_and_bad_ones_are_refused
4.9  S  @path completes and attaches; binary files are refused | tools:files_become_chips_and_bad_ones_are_refused
4.10 M  copying gives the source, code exactly, selections unwrapped | tools:copy_gives_sources_exactly tools:mouse_selection_undoes_wrapping
4.10 M  the mouse can be given to the terminal | tools:the_mouse_can_be_given_away
4.11 M  titles | store/conversations:title_is_the_first_line_of_the_first_user_message store/conversations:titles_are_cut_at_sixty_cells
5    M  targets are measured on a real terminal | bench/ui:a_short_run_writes_a_receipt
5    M  search rules | store/search:short_words_are_no_prefixes store/search:cjk_is_found_anywhere_in_the_text
6    M  contrast, themes, no meaning by colour alone |
    themes:text_reaches_contrast themes:other_themes_draw_the_same_text snapshots:the_text_is_the_same_in_every_theme
6    S  light or dark from the terminal | themes:the_answer_of_the_terminal_is_told_from_keys
6    M  NO_COLOR; TERM=dumb | snapshots:the_text_is_the_same_in_every_theme test_screen_start:a_dumb_terminal_is_answered_in_lines
6    S  reduced motion | chat:reduced_motion_and_hidden_things
6    S  line mode | plain:a_conversation_in_lines plain:commands_and_errors plain:interrupts
6    M  wide characters in cells | test_commands:wide_characters_count_two_cells render:break_line_loses_nothing_and_fits render:crop_cells
7    M  command words, options anywhere, near matches |
    headless_failures:a_prompt_that_reads_like_a_command headless_failures:options_may_stand_anywhere headless_failures:unknown_options_name_near_ones
7    M  no terminal: scripted, or a usage error |
    headless:without_a_terminal_a_pipe_is_answered_and_it_says_so_once headless:no_terminal_and_no_prompt_is_a_usage_error_with_a_hint
7    M  keys typed before the screen is there are kept |
    background:early_keys_are_not_echoed_and_can_be_read_at_once background:a_signal_in_that_time_gives_the_terminal_back
7    M  full screen with piped input | test_screen_start:piped_text_is_an_attachment_and_keys_come_from_the_terminal
7    M  every option has a test of its effect | test_effects:nothing_is_missing_and_nothing_is_stale
7    S  --max-answer-tokens | headless_turns:the_answers_own_limit engine/answer:the_answers_own_limit_leaves_the_thinking_alone
7    M  --extract, -o, --load-only, --dry-run | headless:extract headless:output_file_appears_complete_and_is_not_overwritten
    headless_turns:load_only_and_dry_run_answer_nothing
7    S  --send, --pick, --theme, --readonly | test_screen_start:options_of_the_screen
8.1  M  order of input | headless:files_then_stdin_then_prompt headless:stdin_alone_is_verbatim_without_its_last_newline
8.2  M  text, json, stream-json | headless:json_is_one_object_with_everything headless:stream_json_begins_with_start_and_ends_with_done
8.3  M  exit codes |
    headless_turns:strict headless_failures:missing_build_is_one_object_and_exit_4 headless_failures:does_not_fit headless_failures:store_failure
    headless_turns:locked_conversation
8.4  S  batch | batch:three_items_with_a_bad_one batch:interrupted_and_resumed_has_no_duplicates
8.5  S  SIGUSR1 says where it stands | signals:sigusr1_prints_where_it_stands
    terminal:sigusr1_says_where_it_stands_and_ends_nothing plain:sigusr1_says_where_it_stands
8.5  M  signals | signals:a_signal_saves_the_text_and_writes_the_last_event signals:a_second_sigint_leaves_at_once
9    M  conversations, models, config | test_commands:list test_commands:models_list_info_add_remove test_commands:config
9    S  conversations import: the whole tree comes back, nothing is overwritten, foreign files are refused |
    test_commands:import_brings_the_whole_tree_back test_commands:import_overwrites_nothing
    test_commands:import_refuses_what_is_foreign_or_damaged
9    M  cache | states:the_commands
9    M  doctor | test_doctor:everything_is_looked_at_and_nothing_is_made test_doctor:folders test_doctor:a_part_is_still_asked_by_name
9    S  completion from the parser, with build names and ids | test_completion:builds_and_conversations
10   M  every setting has a test of its effect | test_effects:nothing_is_missing_and_nothing_is_stale
10   M  unknown keys are warnings, wrong values errors with their place |
    test_settings:unknown_names_are_warnings_with_near_matches test_settings:wrong_types_name_the_key_and_the_line
    test_setting_effects:a_theme_that_is_not_there_is_an_error_with_its_place
10   M  each front end continues the other's conversations | states:both_front_ends_take_turns
10   M  order of the layers, files and folders |
    test_settings:order_of_file_environment_and_command_line test_settings:places
    store/db:files_are_0600_and_folders_0700_whatever_the_umask
12.1 M  type, paste, send: one message | acceptance:1_typed_and_pasted_text_is_one_message terminal:a_chat_in_a_terminal
12.2 M  every kind of text streams without loss, drawn as the whole |
    acceptance:2_streamed_text_is_complete_and_drawn_as_the_whole render:chunks_do_not_change_the_blocks
12.3 M  scrolled up the view stays, End follows | chat:scrolling_up_stops_following_and_end_resumes
12.4 M  Esc in prefill, thinking and answer | acceptance:4_esc_in_prefill_in_thinking_and_in_the_answer states:cancelled_turns
12.5 M  an edit makes a branch, both are exported | tools:edit_makes_a_branch_and_both_stay_reachable
12.6 M  kill -9 while streaming | terminal:a_kill_loses_no_shown_text_of_a_second_ago kills:killed_at_three_moments
12.7 M  kill -TERM | terminal:a_signal_restores_the_terminal_and_keeps_the_text
12.8 M  resize while streaming | terminal:resizing_while_streaming
12.9 M  pipes: every line parses, head is quiet, SIGINT 130 | acceptance:9_head_of_a_pipe_is_quiet
    headless:stream_json_begins_with_start_and_ends_with_done signals:a_reader_that_goes_away_ends_it_quietly
    signals:a_signal_saves_the_text_and_writes_the_last_event
12.10 M a missing build: one object, exit 4 | headless_failures:missing_build_is_one_object_and_exit_4
12.11 M batch with a bad item; interrupted and resumed | batch:three_items_with_a_bad_one batch:interrupted_and_resumed_has_no_duplicates
12.12 M closed and silent input | signals:closed_and_silent_standard_input_do_not_hang
12.13 M no back end: start, search, export | acceptance:13_without_a_back_end_it_starts_searches_and_exports
12.14 M light, dark, ansi, NO_COLOR | snapshots:the_text_is_the_same_in_every_theme
12.15 M two processes on one conversation | terminal:a_second_process_reads_only
12.16 M a failed switch: the old build answers |
    tools:a_failed_switch_leaves_the_old_build_answering switch:a_failing_switch_leaves_the_old_build_answering
"""


def rows() -> list[tuple[str, str, str, list[str]]]:
    found = []
    for line in TABLE.strip().replace("\n    ", " ").splitlines():
        head, _, tests = line.partition(" |")
        section, mark, promise = head.split(None, 2)
        found.append((section, mark, promise.strip(), tests.split()))
    return found


def file_of(name: str) -> Path:
    folder, _, stem = name.rpartition("/")
    if name.startswith("test_"):
        return TESTS / f"{name}.py"
    return TESTS / (folder or "ui") / f"test_{stem}.py"


@cache
def functions(path: Path) -> dict[str, ast.AST]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} {row[2][:40]}")
def test_each_promise_has_its_tests(row):
    section, mark, promise, tests = row
    assert mark in ("M", "S") and promise and tests
    for name in tests:
        file, _, function = name.partition(":")
        known = functions(file_of(file))
        assert f"test_{function}" in known, f"{name} is not there"
        decorators = " ".join(ast.unparse(one) for one in known[f"test_{function}"].decorator_list)
        assert ".skip" not in decorators and "slow" not in decorators, f"{name} does not run by default"


def test_every_acceptance_check_has_a_row_and_runs_with_the_embedded_model():
    assert [row[0] for row in rows() if row[0].startswith("12.")] == [f"12.{number}" for number in range(1, 17)]
    embedded = functions(TESTS / "ui" / "test_acceptance_embedded.py")
    assert {name.split("_")[1] for name in embedded if name.startswith("test_")} == {str(number) for number in range(1, 17)}

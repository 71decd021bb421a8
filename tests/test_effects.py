"""Every option and every setting has a test of its effect: the lists come from the parsers and from the table of settings.

Each row: `chat --option`, `COMMAND SUBCOMMAND` (its arguments), `COMMAND SUBCOMMAND --option` or `setting section.key`, and the tests
that show what it does, as in tests/ui/test_promises.py. A named test must run by default and must contain the option, the
subcommand or the key: a row cannot point anywhere. Instruments (bench, eval, models prune) are held to it arm by arm, once one
of their options has a row.
"""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from pathlib import Path

import pytest

from dsv41chat.cli_commands import command_parser, common_parser
from dsv41chat.cli_options import COMMANDS, chat_parser
from dsv41chat.settings import KEYS
from tests.ui.test_promises import file_of, functions

TABLE = """
chat --prompt            | headless:prompt_file_is_verbatim_and_keeps_its_place
chat --prompt-file       | headless:prompt_file_is_verbatim_and_keeps_its_place
chat --file              | headless:files_then_stdin_then_prompt test_screen_start:files_are_attachments
chat --no-stdin          | headless:no_stdin_leaves_a_pipe_alone
chat --continue          | headless_turns:continue_and_resume_send_the_history_with_verbatim_ids
chat --resume            | headless_turns:continue_and_resume_send_the_history_with_verbatim_ids test_screen_start:which_conversation
chat --conversation      | headless_turns:conversation_makes_it_when_absent
chat --branch            | headless_turns:branch_attaches_to_an_earlier_message
chat --fork              | headless_turns:fork_copies_first
chat --system            | headless_turns:system_prompt
chat --system-file       | headless_turns:system_prompt
chat --no-save           | headless_turns:no_save_leaves_nothing
chat --no-cache          | headless_turns:no_cache_computes_every_prompt
chat --model             | test_commands:model_names_and_folders_of_the_config
chat --effort            | headless_turns:max_tokens_stop_and_effort
chat --temperature       | headless_turns:sampling_options_reach_the_engine
chat --top-p             | headless_turns:sampling_options_reach_the_engine
chat --min-p             | headless_turns:sampling_options_reach_the_engine
chat --top-k             | headless_turns:sampling_options_reach_the_engine
chat --presence-penalty  | headless_turns:sampling_options_reach_the_engine
chat --frequency-penalty | headless_turns:sampling_options_reach_the_engine
chat --seed              | headless_turns:seeds embedded:seeds_repeat_in_new_processes_and_differ_from_each_other
chat --max-tokens        | headless_turns:max_tokens_stop_and_effort
chat --max-answer-tokens | headless_turns:the_answers_own_limit
chat --stop              | headless_turns:max_tokens_stop_and_effort
chat --draft             | headless_turns:sampling_options_reach_the_engine headless_turns:a_draft_that_the_build_cannot_make_is_refused
chat --context           | headless_turns:engine_options_reach_the_engine
chat --engram            | engram:settings_reach_the_reader
chat --allow-second      | headless_turns:only_one_process_holds_a_large_build
chat --headless          | headless:text_writes_the_answer_and_nothing_else
chat --text              | test_screen_start:an_option_of_scripted_mode_implies_it
chat --json              | headless:json_is_one_object_with_everything
chat --stream-json       | headless:stream_json_begins_with_start_and_ends_with_done
chat --no-stream         | headless:no_stream_writes_once
chat --show-thinking     | headless:show_thinking_goes_to_stderr_dim_on_a_terminal
chat --extract           | headless:extract
chat --output            | headless:output_file_appears_complete_and_is_not_overwritten
chat --force             | headless:output_file_appears_complete_and_is_not_overwritten switch:a_build_that_does_not_fit
chat --strict            | headless_turns:strict
chat --timeout           | signals:the_time_limit
chat --progress          | headless:progress
chat --load-only         | headless_turns:load_only_and_dry_run_answer_nothing
chat --dry-run           | headless_turns:load_only_and_dry_run_answer_nothing
chat --batch             | batch:three_items_with_a_bad_one
chat --batch-output      | batch:output_file_and_resume
chat --resume-batch      | batch:interrupted_and_resumed_has_no_duplicates
chat --fail-fast         | batch:fail_fast
chat --save              | batch:save_makes_conversations
chat --send              | test_screen_start:options_of_the_screen
chat --pick              | test_screen_start:options_of_the_screen
chat --theme             | test_screen_start:options_of_the_screen
chat --no-mouse          | test_screen_start:options_of_the_screen
chat --readonly          | test_screen_start:which_conversation
chat --plain             | test_option_effects:plain_is_the_line_mode
chat --config            | headless_failures:config_errors
chat --data-dir          | test_commands:an_empty_place_is_refused engram:settings_reach_the_reader
chat --log-file          | headless_turns:log_file_and_debug_output
chat --quiet             | headless:quiet_leaves_stderr_empty
chat --verbose           | headless:verbose_prints_timings headless:draft_events_come_with_verbose
chat --version           | test_commands:version

conversations list            | test_commands:list
conversations list --search   | test_commands:list
conversations list --limit    | test_commands:list
conversations list --build    | test_commands:list
conversations list --archived | test_commands:rename_delete_undelete
conversations show            | test_commands:show
conversations show --branch   | test_commands:show
conversations show --tree     | test_commands:show
conversations show --thinking | test_commands:show
conversations export          | test_commands:export_json_holds_the_whole_tree
conversations export --all    | test_commands:export_other_formats
conversations export --format | test_commands:export_other_formats
conversations export --output | test_commands:export_other_formats
conversations export --force  | test_commands:export_other_formats
conversations search          | test_commands:search
conversations search --limit  | test_commands:search
conversations search --in     | test_commands:search
conversations import          | test_commands:import_brings_the_whole_tree_back test_commands:import_refuses_what_is_foreign_or_damaged
conversations rename          | test_commands:rename_delete_undelete
conversations delete          | test_commands:rename_delete_undelete
conversations delete --yes    | test_commands:rename_delete_undelete
conversations undelete        | test_commands:rename_delete_undelete
models list                   | test_commands:models_list_info_add_remove
models info                   | test_commands:models_list_info_add_remove
models fits                   | test_commands:models_fits
models fits --mac             | test_commands:models_fits
models fits --markdown        | test_readme:the_table_of_machines_is_what_the_admission_says
models add                    | test_commands:models_list_info_add_remove
models add --name             | test_commands:model_names_and_folders_of_the_config
models remove                 | test_commands:models_list_info_add_remove
models verify                 | embedded:verify_a_good_pack
models verify --full          | embedded:convert_and_verify_every_byte
models verify --goldens       | embedded:verify_finds_a_fault
models verify --dtype         | test_option_effects:verify_options_reach_the_comparison
models verify --atol          | embedded:verify_goldens
models verify --chunks        | test_option_effects:verify_options_reach_the_comparison
models convert                | embedded:convert_and_verify_every_byte
models convert --recipe       | embedded:convert_and_verify_every_byte
models convert --engram       | test_option_effects:convert_options_reach_the_conversion
models convert --drafter      | test_option_effects:convert_options_reach_the_conversion
models convert --from         | test_option_effects:convert_options_reach_the_conversion
models convert --resume       | test_option_effects:convert_options_reach_the_conversion
models convert --yes          | embedded:convert_and_verify_every_byte
cache stats                   | states:the_commands
cache list                    | states:the_commands
cache prune                   | states:the_commands
cache prune --older-than      | states:the_commands
cache prune --to              | test_option_effects:cache_prune_to_a_size_and_of_a_build
cache prune --build           | test_option_effects:cache_prune_to_a_size_and_of_a_build
cache prune --all             | states:the_commands
cache prune --dry-run         | states:the_commands
config show                   | test_commands:config
config show --origin          | test_commands:config
config path                   | test_commands:config
config init                   | test_commands:config
config set                    | test_commands:config
config get                    | test_commands:config_get_and_unset
config unset                  | test_commands:config_get_and_unset
doctor engram                 | engram:doctor_engram
doctor engram --model         | engram:doctor_engram
doctor engram --no-measure    | engram:doctor_engram
doctor drafting               | engine/draft/doctor:doctor_shows_verdicts_and_keeps_costs
doctor drafting --model       | engine/draft/doctor:doctor_shows_verdicts_and_keeps_costs
doctor drafting --no-measure  | engine/draft/doctor:doctor_shows_verdicts_and_keeps_costs
doctor routes                 | test_setting_effects:routes
doctor routes --model         | test_setting_effects:routes
doctor states                 | states:the_commands
doctor states --model         | states:the_commands
bench engram --folder         | test_option_effects:bench_options_reach_their_arm
bench engram --gigabytes      | test_option_effects:bench_options_reach_their_arm
bench engram --rounds         | test_option_effects:bench_options_reach_their_arm
bench engram --note           | test_option_effects:bench_options_reach_their_arm
bench engram --output         | test_option_effects:bench_options_reach_their_arm
bench draft --build           | test_option_effects:bench_options_reach_their_arm
bench draft --repeats         | test_option_effects:bench_options_reach_their_arm
bench draft --tokens          | test_option_effects:bench_options_reach_their_arm
bench draft --long            | test_option_effects:bench_options_reach_their_arm
bench draft --short           | test_option_effects:bench_options_reach_their_arm
bench draft --seeds           | test_option_effects:bench_options_reach_their_arm
bench draft --acceptance      | bench/draft_scripted:the_command
bench draft --context         | bench/draft_scripted:the_command
bench draft --steps           | bench/draft_scripted:the_command
bench draft --output          | test_option_effects:bench_options_reach_their_arm
bench ui --messages           | test_option_effects:bench_options_reach_their_arm
bench ui --search-messages    | test_option_effects:bench_options_reach_their_arm
bench ui --seconds            | test_option_effects:bench_options_reach_their_arm
bench ui --rate               | test_option_effects:bench_options_reach_their_arm
bench ui --contents           | test_option_effects:bench_options_reach_their_arm
bench ui --output             | test_option_effects:bench_options_reach_their_arm
bench resume --tokens         | test_option_effects:bench_options_reach_their_arm
bench resume --repeats        | test_option_effects:bench_options_reach_their_arm
bench resume --folder         | test_option_effects:bench_options_reach_their_arm
bench resume --output         | test_option_effects:bench_options_reach_their_arm
eval ppl --corpus             | bench/eval/ppl:options_reach_the_measurement
eval ppl --window             | bench/eval/ppl:options_reach_the_measurement
eval ppl --stride             | bench/eval/ppl:options_reach_the_measurement
eval ppl --tokens             | bench/eval/ppl:options_reach_the_measurement
eval ppl --no-bos             | bench/eval/ppl:options_reach_the_measurement
eval ppl --dtype              | bench/eval/ppl:options_reach_the_measurement
eval ppl --chunk              | bench/eval/ppl:options_reach_the_measurement
eval ppl --output             | bench/eval/ppl:options_reach_the_measurement
eval ppl --fresh              | bench/eval/ppl:an_interrupted_run_goes_on_unless_it_is_to_start_fresh
eval table --folder           | bench/eval/table:the_whole_table_by_one_command
eval table --corpus           | bench/eval/table:the_whole_table_by_one_command
eval table --tokens           | bench/eval/table:the_whole_table_by_one_command
eval table --fresh            | bench/eval/table:the_whole_table_by_one_command
eval table --output           | bench/eval/table:the_whole_table_by_one_command
eval report --output          | bench/eval/ppl:a_receipt_belongs_to_one_fingerprint
models prune --experts        | engine/prune:the_command
models prune --text           | engine/prune:the_command
models prune --tokens         | engine/prune:the_command
models prune --resume         | engine/prune:the_command
models prune --yes            | engine/prune:the_command
eval ladder --against         | bench/eval/ladder:the_command
eval ladder --text            | bench/eval/ladder:the_command
eval ladder --tokens          | bench/eval/ladder:the_command
eval ladder --dtype           | bench/eval/ladder:the_command
eval ladder --fresh           | bench/eval/ladder:the_command
eval ladder --output          | bench/eval/ladder:the_command
eval needle --tokens          | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --depths          | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --count           | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --seed            | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --haystack        | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --bar             | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --fresh           | bench/eval/needle:the_command_goes_on_after_a_kill
eval needle --output          | bench/eval/needle:the_command_goes_on_after_a_kill
eval selfcheck --tokens       | bench/eval/selfcheck:the_command
eval selfcheck --dtype        | bench/eval/selfcheck:the_command
eval selfcheck --fresh        | bench/eval/selfcheck:the_command
eval selfcheck --output       | bench/eval/selfcheck:the_command
completion bash               | test_completion:bash_completes
completion zsh                | test_completion:scripts_are_valid
completion fish               | test_completion:scripts_are_valid
completion words              | test_completion:commands_subcommands_and_options

setting chat.system            | test_setting_effects:system_and_effort_of_new_conversations
setting chat.effort            | test_setting_effects:system_and_effort_of_new_conversations
setting chat.keep_reasoning    | test_setting_effects:keep_reasoning_shows_the_model_its_earlier_thoughts
setting chat.v4_effort         | test_setting_effects:v4_effort_chooses_the_texts_of_a_v4_build
setting chat.temperature       | test_setting_effects:sampling_settings_reach_the_engine
setting chat.top_k             | test_setting_effects:sampling_settings_reach_the_engine
setting chat.top_p             | test_setting_effects:sampling_settings_reach_the_engine
setting chat.min_p             | test_setting_effects:sampling_settings_reach_the_engine
setting chat.presence_penalty  | test_setting_effects:sampling_settings_reach_the_engine
setting chat.frequency_penalty | test_setting_effects:sampling_settings_reach_the_engine
setting chat.max_tokens        | test_setting_effects:sampling_settings_reach_the_engine
setting chat.loop_stop         | test_setting_effects:sampling_settings_reach_the_engine engine/answer:loop_stop_can_be_switched_off
setting chat.keep_deleted_days | test_setting_effects:keep_deleted_days
setting engine.model           | test_setting_effects:model_and_folders
setting engine.model_dirs      | test_setting_effects:model_and_folders
setting engine.context         | test_setting_effects:engine_settings_count_in_the_engine
setting engine.draft           | test_setting_effects:sampling_settings_reach_the_engine
setting engine.exact           | test_setting_effects:engine_settings_reach_the_engine
setting engine.engram          | test_setting_effects:engine_settings_reach_the_engine
setting engine.cache_quant     | test_setting_effects:engine_settings_reach_the_engine engine/loader:verification_passes_and_reports_rounding
setting engine.routes          | test_setting_effects:routes
setting engine.linear_input_fp8 | test_setting_effects:engine_settings_reach_the_engine engine/trunk_v41:linear_input_rounding_on_the_rows_that_agree
setting engine.qat_sim         | test_setting_effects:engine_settings_reach_the_engine engine/v4/goldens:simulated_rounding
setting engine.memory_margin   | test_setting_effects:engine_settings_count_in_the_engine
setting engram.scales          | test_setting_effects:engine_settings_reach_the_engine
setting engram.access          | test_setting_effects:engine_settings_reach_the_engine engine/engram/faults:a_failing_drive
setting engram.path            | test_setting_effects:engine_settings_reach_the_engine
setting engram.cache_budget    | test_setting_effects:engine_settings_reach_the_engine
setting engram.row_cache       | test_setting_effects:engine_settings_reach_the_engine
setting cache.enabled          | states:switched_off
setting cache.dir              | test_setting_effects:cache_settings
setting cache.budget           | states:switched_off states:the_budget_holds_and_the_open_conversation_resumes
setting cache.strict           | states:strict_mode_resumes_only_on_the_grid
setting cache.min_tokens       | test_setting_effects:cache_settings
setting ui.theme               | test_setting_effects:theme test_setting_effects:a_theme_that_is_not_there_is_an_error_with_its_place
setting ui.mouse               | test_setting_effects:mouse
setting ui.sidebar             | test_setting_effects:sidebar
setting ui.thinking            | test_setting_effects:thinking
setting ui.math                | test_setting_effects:math
setting ui.wrap_code           | test_setting_effects:wrap_code
setting ui.confirm_quit        | test_setting_effects:confirm_quit
setting ui.reduced_motion      | test_setting_effects:reduced_motion
setting ui.burst_paste         | test_setting_effects:burst_paste
setting log.level              | test_setting_effects:log_level_and_content
setting log.content            | test_setting_effects:log_level_and_content
"""
ARM_BY_ARM = ("bench", "eval", "models prune")


def rows() -> dict[str, list[str]]:
    return {" ".join(name.split()): tests.split() for name, _, tests in (line.partition("|") for line in TABLE.strip().splitlines()) if name.strip()}


def _options(parser: argparse.ArgumentParser, without: set[str]) -> dict[str, list[str]]:
    actions = [a for a in parser._actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
    return {a.option_strings[-1]: a.option_strings for a in actions if a.option_strings[-1] not in without}


@cache
def everything() -> dict[str, list[str]]:
    """What must have a row, and the spellings of which a test must contain one."""
    found = {f"chat {name}": spellings for name, spellings in _options(chat_parser(), set()).items()}
    common = set(_options(common_parser(), set()))
    for command in COMMANDS:
        for name, parser in command_parser(command)[1].choices.items():
            place = f"{command} {name}"
            options = {f"{place} {option}": spellings for option, spellings in _options(parser, common).items()}
            if place.startswith(ARM_BY_ARM):
                found |= options if any(option in rows() for option in options) else {}
            else:
                found |= {place: [f'"{name}"', f"'{name}'", f" {name}"], **options}
    return found | {f"setting {key.name}": [key.field] for key in KEYS.values()}


def source(path: Path, name: str) -> str:
    """A test with its decorators."""
    node = functions(path)[name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(path.read_text("utf-8").splitlines()[first - 1 : node.end_lineno]).replace("\\n", " ")


def test_nothing_is_missing_and_nothing_is_stale():
    assert list(set(everything()) - set(rows())) == [], "options and settings without a test of their effect"
    assert list(set(rows()) - set(everything())) == [], "rows of what is not there any more"


@pytest.mark.parametrize("name", rows())
def test_each_has_a_test_that_names_it(name):
    assert rows()[name]
    for one in rows()[name]:
        file, _, function = one.partition(":")
        known = functions(file_of(file))
        assert f"test_{function}" in known, f"{one} is not there"
        decorators = " ".join(ast.unparse(decorator) for decorator in known[f"test_{function}"].decorator_list)
        assert "slow" not in decorators, f"{one} does not run by default"
        text = source(file_of(file), f"test_{function}")
        if one.startswith("test_option_effects:bench_"):
            text = file_of(file).read_text("utf-8")  # the words stand in a table beside it
        spellings = everything().get(name, [])
        named = any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])" if word[0] != '"' else re.escape(word), text) for word in spellings)
        assert named, f"{one} does not mention {name}"

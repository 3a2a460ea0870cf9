"""The ``hvd-ckpt`` command.

main          the group of commands, which are imported when they are called
options       flags from the fields of a pydantic model
run_command   commands that take the settings of a run, as flags and from a YAML file
command_line  what commands have in common: errors in one line, folders for results, progress
train, plan, layout, export, doctor
              a command each: parse, call, print
tables        tables in the terminal and on pages
plan_show     tables and plots of a plan
"""

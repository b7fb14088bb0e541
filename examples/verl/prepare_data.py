"""Write a data set as the Parquet files that verl reads.

    python examples/verl/prepare_data.py agentica-org/DeepScaleR-Preview-Dataset data/deepscaler
    python examples/verl/prepare_data.py google-research-datasets/nq_open data/nq --question question --answer answer \\
        --instruction "Search if you need to. End with <answer>your answer</answer>."

The name is one on the Hugging Face hub, or a local .parquet, .json or .jsonl file.
"""

import argparse
from pathlib import Path

import datasets

MATH = "Let's think step by step and put the final answer within \\boxed{}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="data set on the hub, or a file")
    parser.add_argument("folder", type=Path, help="where train.parquet and val.parquet go")
    parser.add_argument("--question", default="problem", help="column of the question (default: problem)")
    parser.add_argument("--answer", default="answer", help="column of the answer (default: answer)")
    parser.add_argument("--instruction", default=MATH, help="what follows each question")
    parser.add_argument("--num-val", type=int, default=500, help="problems held out for validation (default: 500)")
    arguments = parser.parse_args()

    if Path(arguments.name).is_file():
        kind = "parquet" if arguments.name.endswith(".parquet") else "json"
        rows = datasets.load_dataset(kind, data_files=arguments.name, split="train")
    else:
        rows = datasets.load_dataset(arguments.name, split="train")
    missing = {arguments.question, arguments.answer} - set(rows.column_names)
    if missing:
        raise SystemExit(f"{arguments.name} has no column {sorted(missing)}; it has {rows.column_names}")

    def as_verl(row, index):
        question = f"{row[arguments.question]}\n{arguments.instruction}"
        return {
            "data_source": arguments.name,
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row[arguments.answer]},
            "extra_info": {"index": index},
        }

    rows = rows.map(as_verl, with_indices=True, remove_columns=rows.column_names)
    parts = rows.train_test_split(test_size=min(arguments.num_val, len(rows) // 2), seed=0)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for part, file in (("train", "train.parquet"), ("test", "val.parquet")):
        parts[part].to_parquet(arguments.folder / file)
        print(f"{len(parts[part]):,} problems in {arguments.folder / file}")


if __name__ == "__main__":
    main()

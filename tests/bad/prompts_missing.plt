import "base/gpt.plt"

generate {
  prompts   = "no_prompts.txt" #! E0354
  tokenizer = "no_tokenizer" #! E0355
}

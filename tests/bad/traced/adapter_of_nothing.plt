import "../base/gpt.plt"

model {
  network = python("adapters:Net")
  adapter = lora(4, ["q_proj", "upp"]) #! E0727
}

data {
  source = stdlib(context = 32)
}

import "../base/gpt.plt"

model {
  network = python("adapters:Net")
  adapter = lora(4, "up", save = ["norm", "head"]) #! E0730
}

data {
  source = stdlib(context = 32)
}

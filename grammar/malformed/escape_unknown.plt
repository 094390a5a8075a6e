data {
  source = text("C:\data\new.txt")
}

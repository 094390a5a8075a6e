data {
  source = text(env("DATA"))
  batch  = $BATCH
}

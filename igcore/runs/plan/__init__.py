"""What a run will need before it is started: memory, devices and hours, estimated by formula from
its parameters alone.
"""

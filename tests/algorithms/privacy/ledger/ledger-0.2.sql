BEGIN TRANSACTION;
CREATE TABLE epsilonflow_ledger (
	seq INTEGER NOT NULL, 
	kind TEXT NOT NULL CHECK (kind IN ('population', 'cap', 'reserve', 'settle', 'forfeit')), 
	population TEXT NOT NULL, 
	block TEXT NOT NULL, 
	run_id TEXT, 
	epsilon DOUBLE, 
	delta DOUBLE NOT NULL, 
	events TEXT NOT NULL, 
	about TEXT NOT NULL, 
	written_at TEXT NOT NULL, 
	previous_hash TEXT NOT NULL, 
	hash TEXT NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (run_id, kind, block), 
	CHECK ((run_id IS NULL) = (kind IN ('population', 'cap'))), 
	UNIQUE (previous_hash), 
	UNIQUE (hash)
);
INSERT INTO "epsilonflow_ledger" VALUES(1,'population','patients','all',NULL,8.0,1.0e-05,'[]','{"blocks_per_person":2,"bound":{"unit":"a person"},"composition":{"kind":"zcdp"},"public":false}','2026-11-23T13:22:36.441619+00:00','0000000000000000000000000000000000000000000000000000000000000000','2017bf73c9bfb525a7149fee02df59a07022226d11d226b4fba491aba265d0b7');
INSERT INTO "epsilonflow_ledger" VALUES(2,'cap','patients','january',NULL,8.0,1.0e-05,'[]','{"declared":true}','2026-11-23T13:22:36.467075+00:00','2017bf73c9bfb525a7149fee02df59a07022226d11d226b4fba491aba265d0b7','3cb94a2a56897518cd6eef42dcc7a315b9df43b9a6b7fde39c7ff9e9479ebc42');
INSERT INTO "epsilonflow_ledger" VALUES(3,'cap','patients','february',NULL,4.0,1.0e-05,'[]','{"declared":true}','2026-11-23T13:22:36.487385+00:00','3cb94a2a56897518cd6eef42dcc7a315b9df43b9a6b7fde39c7ff9e9479ebc42','68ed9cdf791c5da4572290b646855e8130e17cbb5084a84550d9de56ddca8c2f');
INSERT INTO "epsilonflow_ledger" VALUES(4,'reserve','patients','january','a',1.0,1.0e-06,'[{"count":1,"event":{"noise_multiplier":4.0,"type":"GaussianDpEvent"}}]','{"held":["x1"],"price":0.0625,"retraining":"m 2026-W01","together":2}','2026-11-23T13:22:36.512992+00:00','68ed9cdf791c5da4572290b646855e8130e17cbb5084a84550d9de56ddca8c2f','6df9f6bc4449426b4df96192445158eecc261b1d2930e6a6766718b88a6f3916');
INSERT INTO "epsilonflow_ledger" VALUES(5,'reserve','patients','february','a',1.0,1.0e-06,'[{"count":1,"event":{"noise_multiplier":4.0,"type":"GaussianDpEvent"}}]','{"price":0.0625,"retraining":"m 2026-W01","together":2}','2026-11-23T13:22:36.512992+00:00','6df9f6bc4449426b4df96192445158eecc261b1d2930e6a6766718b88a6f3916','8a80d9b7f8ef0d3161d52d2db7dc055aadd9c281eeb7f22817a0c3a49cc369f3');
INSERT INTO "epsilonflow_ledger" VALUES(6,'settle','patients','january','a',1.0,1.0e-06,'[{"count":1,"event":{"noise_multiplier":4.0,"type":"GaussianDpEvent"}}]','{"model":"ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff","price":0.0625,"together":2}','2026-11-23T13:22:36.540448+00:00','8a80d9b7f8ef0d3161d52d2db7dc055aadd9c281eeb7f22817a0c3a49cc369f3','048bca140ce42c2f68d0d8f78d33be3127529538f87c8d8bd31e742024447194');
INSERT INTO "epsilonflow_ledger" VALUES(7,'settle','patients','february','a',1.0,1.0e-06,'[{"count":1,"event":{"noise_multiplier":4.0,"type":"GaussianDpEvent"}}]','{"model":"ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff","price":0.0625,"together":2}','2026-11-23T13:22:36.540448+00:00','048bca140ce42c2f68d0d8f78d33be3127529538f87c8d8bd31e742024447194','a8c92312b987de09b68d6bd49a4e0ff91981088ab2452b76c3267154c24056ff');
INSERT INTO "epsilonflow_ledger" VALUES(8,'reserve','patients','january','b',1.0,1.0e-06,'[{"count":1,"event":{"noise_multiplier":4.0,"type":"GaussianDpEvent"}}]','{"price":0.03125,"together":1}','2026-11-23T13:22:36.568496+00:00','a8c92312b987de09b68d6bd49a4e0ff91981088ab2452b76c3267154c24056ff','0562beb2f88e9aee00c8480e102e23b1ed74dffe2dae242cafa7529702556b65');
INSERT INTO "epsilonflow_ledger" VALUES(9,'population','digits','all',NULL,10.0,0.001,'[]','{"blocks_per_person":1,"bound":{},"composition":{"kind":"basic"},"public":true}','2026-11-23T13:22:36.591292+00:00','0562beb2f88e9aee00c8480e102e23b1ed74dffe2dae242cafa7529702556b65','7b5d85877b2893aa42b94f9fe18460f9ba91db4b0f2d978761eac77cf3144df7');
INSERT INTO "epsilonflow_ledger" VALUES(10,'reserve','digits','all','free',NULL,1.0,'[]','{}','2026-11-23T13:22:36.612718+00:00','7b5d85877b2893aa42b94f9fe18460f9ba91db4b0f2d978761eac77cf3144df7','c257acaa66adbce7af9da800685676bd36902278daa1877198d48f7cda625a2f');
INSERT INTO "epsilonflow_ledger" VALUES(11,'reserve','digits','all','c',0.1,1.0e-09,'[]','{}','2026-11-23T13:22:36.617189+00:00','c257acaa66adbce7af9da800685676bd36902278daa1877198d48f7cda625a2f','c6dd933b6362bb558ca3da40a740bc38a60638e02d0b726af46aa4956b87a3ba');
INSERT INTO "epsilonflow_ledger" VALUES(12,'forfeit','digits','all','c',0.1,1.0e-09,'[]','{}','2026-11-23T13:22:36.647299+00:00','c6dd933b6362bb558ca3da40a740bc38a60638e02d0b726af46aa4956b87a3ba','9cc3ce400eb62fd4084d877bbd836c4f3c10345450c49cd05b78a5088d6a581e');
INSERT INTO "epsilonflow_ledger" VALUES(13,'cap','patients','all',NULL,8.0,1.0e-05,'[]','{"by":"the owner","overruled":["february","january"]}','2026-11-23T13:22:36.671316+00:00','9cc3ce400eb62fd4084d877bbd836c4f3c10345450c49cd05b78a5088d6a581e','6328eca516840863fe203e95b84e1be02b4b9a04eb506b29edce577f6b6bbae3');
INSERT INTO "epsilonflow_ledger" VALUES(14,'cap','patients','february',NULL,4.0,1.0e-05,'[]','{"retired":true}','2026-11-23T13:22:36.691342+00:00','6328eca516840863fe203e95b84e1be02b4b9a04eb506b29edce577f6b6bbae3','fb0fa273a3ae7bc31f03d96eb0996b3e20da39244251624460b691b972608c3b');
INSERT INTO "epsilonflow_ledger" VALUES(15,'cap','digits','all',NULL,0.3,0.001,'[]','{}','2026-11-23T13:22:36.715364+00:00','fb0fa273a3ae7bc31f03d96eb0996b3e20da39244251624460b691b972608c3b','458f87b68e326b8b5c7a62e894276fe2b056e6551c2eefb7283baaa1ec7c2d3c');
CREATE TRIGGER epsilonflow_ledger_no_update BEFORE UPDATE ON epsilonflow_ledger BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
CREATE TRIGGER epsilonflow_ledger_no_delete BEFORE DELETE ON epsilonflow_ledger BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
CREATE TRIGGER epsilonflow_ledger_no_replace BEFORE INSERT ON epsilonflow_ledger WHEN NEW.seq <= (SELECT max(seq) FROM epsilonflow_ledger) BEGIN SELECT RAISE(ABORT, 'the rows of the ledger are never changed or removed'); END;
COMMIT;
